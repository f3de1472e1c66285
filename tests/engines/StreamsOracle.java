import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.common.serialization.StringSerializer;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.TestInputTopic;
import org.apache.kafka.streams.TopologyTestDriver;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.Joined;
import org.apache.kafka.streams.kstream.KGroupedStream;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.KTable;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.SessionWindows;
import org.apache.kafka.streams.kstream.Suppressed;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.kstream.ValueJoiner;
import org.apache.kafka.streams.kstream.Windowed;
import org.apache.kafka.streams.state.Stores;

/**
 * What Kafka Streams gives for cases on stdin, by its TopologyTestDriver.
 *
 * A case is a line `KIND NUMBER...`, lines `TOPIC KEY TIME VALUE` with `-` for no value, and a line `end`. The answer is
 * a line for each record that its topology gives, in order, and a line `end`: `KEY START END VALUE` of a window that has
 * closed, else `KEY VALUE`, and of a pair `LEFT,RIGHT`.
 */
public class StreamsOracle {
    private static final ValueJoiner<String, String, String> PAIR = (left, right) -> (left == null ? "-" : left) + "," + (right == null ? "-" : right);

    public static void main(String[] args) throws Exception {
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        String folder = Files.createTempDirectory(java.nio.file.Path.of(args[0]), "streams").toString();
        for (String line; (line = in.readLine()) != null; ) {
            List<String> given = new ArrayList<>();
            StreamsBuilder builder = new StreamsBuilder();
            build(builder, line.split(" "), given);
            Properties properties = new Properties();
            properties.put(StreamsConfig.APPLICATION_ID_CONFIG, "oracle");
            properties.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, "none:1");
            properties.put(StreamsConfig.STATE_DIR_CONFIG, folder);
            properties.put(StreamsConfig.DEFAULT_KEY_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
            properties.put(StreamsConfig.DEFAULT_VALUE_SERDE_CLASS_CONFIG, Serdes.StringSerde.class);
            properties.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0L);
            properties.put("dsl.store.suppliers.class", "org.apache.kafka.streams.state.BuiltInDslStoreSuppliers$InMemoryDslStoreSuppliers");
            properties.put("__emit.interval.ms.kstreams.outer.join.spurious.results.fix__", 0L);
            try (TopologyTestDriver driver = new TopologyTestDriver(builder.build(), properties)) {
                Map<String, TestInputTopic<String, String>> topics = new HashMap<>();
                for (String record; !(record = in.readLine()).equals("end"); ) {
                    String[] parts = record.split(" ");
                    topics.computeIfAbsent(parts[0], name -> driver.createInputTopic(name, new StringSerializer(), new StringSerializer()))
                        .pipeInput(parts[1], parts[3].equals("-") ? null : parts[3], Long.parseLong(parts[2]));
                }
            }
            given.forEach(out::println);
            out.println("end");
            out.flush();
        }
    }

    private static void build(StreamsBuilder builder, String[] asked, List<String> given) {
        String kind = asked[0];
        long[] numbers = new long[asked.length];
        for (int i = 1; i < asked.length; i++) numbers[i] = asked[i].matches("-?\\d+") ? Long.parseLong(asked[i]) : 0;
        switch (kind) {
            case "tumbling", "hopping", "session" -> {
                KGroupedStream<String, String> grouped = builder.<String, String>stream("left").groupByKey(Grouped.with(Serdes.String(), Serdes.String()));
                KTable<Windowed<String>, String> windows;
                if (kind.equals("session")) {
                    windows = grouped.windowedBy(SessionWindows.ofInactivityGapAndGrace(ms(numbers[1]), ms(numbers[2])))
                        .aggregate(() -> "", (key, value, all) -> all + "," + value, (key, one, other) -> one + other);
                } else {
                    TimeWindows sized = TimeWindows.ofSizeAndGrace(ms(numbers[1]), ms(numbers[2]));
                    windows = grouped.windowedBy(kind.equals("hopping") ? sized.advanceBy(ms(numbers[3])) : sized)
                        .aggregate(() -> "", (key, value, all) -> all + "," + value);
                }
                windows.suppress(Suppressed.untilWindowCloses(Suppressed.BufferConfig.unbounded())).toStream()
                    .foreach((of, all) -> given.add(of.key() + " " + of.window().start() + " " + of.window().end() + " " + (all == null ? "-" : all.substring(1))));
            }
            case "streams" -> {
                KStream<String, String> left = builder.stream("left"), right = builder.stream("right");
                JoinWindows within = JoinWindows.ofTimeDifferenceAndGrace(ms(Math.max(0, Math.max(-numbers[2], numbers[3]))), ms(numbers[4]))
                    .before(ms(-numbers[2])).after(ms(numbers[3]));
                KStream<String, String> joined = switch (asked[1]) {
                    case "inner" -> left.join(right, PAIR, within);
                    case "left" -> left.leftJoin(right, PAIR, within);
                    default -> left.outerJoin(right, PAIR, within);
                };
                joined.foreach((key, pair) -> given.add(key + " " + pair));
            }
            case "versions" -> {
                KTable<String, String> versions = builder.table("right", Materialized.<String, String>as(
                    Stores.persistentVersionedKeyValueStore("versions", Duration.ofHours(1))));
                Joined<String, String, String> joined = Joined.<String, String, String>as("joined").withGracePeriod(ms(numbers[2]));
                KStream<String, String> left = builder.stream("left");
                (asked[1].equals("inner") ? left.join(versions, PAIR, joined) : left.leftJoin(versions, PAIR, joined))
                    .foreach((key, pair) -> given.add(key + " " + pair));
            }
            case "tables" -> {
                KTable<String, String> left = builder.table("left"), right = builder.table("right");
                boolean inner = asked[1].equals("inner");
                KTable<String, String> joined = asked[2].equals("foreign")
                    ? (inner ? left.join(right, StreamsOracle::foreignKey, PAIR) : left.leftJoin(right, StreamsOracle::foreignKey, PAIR))
                    : (inner ? left.join(right, PAIR) : left.leftJoin(right, PAIR));
                joined.toStream().foreach((key, pair) -> given.add(key + " " + (pair == null ? "-" : pair)));
            }
            default -> throw new IllegalArgumentException(kind);
        }
    }

    /** Of a value `NUMBER:KEY`. */
    private static String foreignKey(String value) {
        String key = value.substring(value.indexOf(':') + 1);
        return key.isEmpty() ? null : key;
    }

    private static Duration ms(long count) {
        return Duration.ofMillis(count);
    }
}
