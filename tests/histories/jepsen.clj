; Jepsen's own analysis of histories, with Elle: clojure -Sdeps '{:deps {jepsen/jepsen {:mvn/version "RELEASE"}}}' \
;   -M tests/histories/jepsen.clj .histories/1-0 .histories/1-1
; Each line has the anomalies of a folder's history, and of these the ones that Jepsen does not allow.
(require '[clojure.edn :as edn]
         '[clojure.java.io :as io]
         '[jepsen.history :as h]
         '[jepsen.tests.kafka :as kafka])

(doseq [folder *command-line-args*]
  (let [history (with-open [file (io/reader (io/file folder "history.edn"))]
                  (h/history (mapv (comp h/op edn/read-string) (line-seq file))))
        errors (:errors (kafka/analysis history {:ww-deps false}))
        allowed (kafka/allowed-error-types {:sub-via #{:assign}, :ww-deps false})]
    (println folder (count history) "lines; anomalies:" (keys errors) "not allowed:" (remove allowed (keys errors)))))
(shutdown-agents)
