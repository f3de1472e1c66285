import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Duration;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.Serde;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.KeyValue;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.EmitStrategy;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.state.Stores;

/** The orders per customer in windows of 10 s on Kafka Streams, exactly once, final results only:
 * java -cp JARS streams_counts.java SERVERS INPUT OUTPUT FOLDER */
public class Counts {
    static final Duration SIZE = Duration.ofSeconds(10);
    static final Duration GRACE = Duration.ofSeconds(2);
    /** Longer than SIZE and GRACE: a store drops windows before they are emitted, if time jumps further than this. */
    static final Duration RETENTION = Duration.ofMinutes(1);
    static final ObjectMapper JSON = new ObjectMapper();

    static byte[] encode(JsonNode node) {
        try {
            return JSON.writeValueAsBytes(node);
        } catch (java.io.IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }

    static JsonNode decode(byte[] bytes) {
        try {
            return JSON.readTree(bytes);
        } catch (java.io.IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }

    static byte[] result(String customer, long start, long count) {
        ObjectNode node = JSON.createObjectNode();
        node.put("customer", customer).put("start", start).put("count", count);
        return encode(node);
    }

    public static void main(String[] args) {
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[0]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, args[2] + "-streams");
        settings.put(StreamsConfig.STATE_DIR_CONFIG, args[3]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 500);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 1);
        settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0);
        settings.put(StreamsConfig.InternalConfig.EMIT_INTERVAL_MS_KSTREAMS_WINDOWED_AGGREGATION, 0L);
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
        settings.put(StreamsConfig.producerPrefix(ProducerConfig.LINGER_MS_CONFIG), 5);
        Serde<JsonNode> json = Serdes.serdeFrom((topic, node) -> encode(node), (topic, bytes) -> decode(bytes));
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(args[1], Consumed.with(Serdes.String(), json).withTimestampExtractor((record, before) -> {
                long id = ((JsonNode) record.value()).get("id").asLong();
                return id + 2000 - id * 7919 % 1500;
            }))
            .groupByKey(Grouped.with(Serdes.String(), json))
            .windowedBy(TimeWindows.ofSizeAndGrace(SIZE, GRACE))
            .emitStrategy(EmitStrategy.onWindowClose())
            .count(Materialized.<String, Long>as(
                    Stores.inMemoryWindowStore("counts", RETENTION, SIZE, false))
                .withKeySerde(Serdes.String()).withValueSerde(Serdes.Long()))
            .toStream()
            .map((at, count) -> KeyValue.pair(at.key(), result(at.key(), at.window().start(), count)))
            .to(args[2], Produced.with(Serdes.String(), Serdes.ByteArray()));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.start();
    }
}
