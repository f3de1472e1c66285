"""Effects of settings of checkpoints and restarts on a job, unless another script shows them; and cancelled runs."""

from __future__ import annotations

from scripted_job import play, scripts


@scripts("""
# interval, shorter than a checkpoint takes: the next one is triggered as soon as it is complete.
job interval_ms=100
running
100 tick -> trigger 1 on 0
200 tick
250 done 1 -> announce 1 & trigger 2 on 1
260 done 2 -> announce 2
300 tick
350 tick -> trigger 3 on 2

# min_pause
job interval_ms=100 min_pause_ms=80
running
100 tick -> trigger 1 on 0
150 done 1 -> announce 1
wake -> 230
229 tick
230 tick -> trigger 2 on 1

# min_pause, after one that was late: timeout says when it is.
job interval_ms=100 min_pause_ms=80 timeout_ms=50 tolerable_failed=9
running
100 tick -> trigger 1 on 0
149 tick
150 tick -> note checkpoint 1 was not acknowledged within 50 ms...
229 tick
230 tick -> trigger 2 on 0

# restart fixed_delay: progress starts the count of attempts anew.
job restart=1
running
failed x -> restart 1 after 70: x
running
+1000 tick -> trigger 1 on 0
done 1 -> announce 1
failed x -> restart 2 after 70: x
running from 1
failed x -> end at 1: ExactlyOnceError ... gives up: x

# A run that is cancelled takes no last checkpoint: what is in flight is aborted, and no failure hides the end.
triggered
cancel a -> restart 1 after 0
cancel a
failed a worker died
recovered 0 -> end at 0 cancelled by a

# A run that is cancelled ends with its newest checkpoint.
triggered
done 1 -> announce 1
cancel a -> restart 1 after 0
recovered 1 -> end at 1 cancelled by a
""")
def test_a_setting(script: str) -> None:
    play(script)
