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
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;

/** Pipelines on Kafka Streams, exactly once: java -cp JARS streams_pipelines.java totals|counts SERVERS INPUT OUTPUT FOLDER
 * `totals` is a running total per customer; `counts` the orders per customer in windows of 10 s, final results only. */
public class Pipelines {
    static final String STORE = "totals";
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

    static class Adder implements Processor<String, byte[], String, byte[]> {
        private ProcessorContext<String, byte[]> context;
        private KeyValueStore<String, Long> totals;

        @Override
        public void init(ProcessorContext<String, byte[]> context) {
            this.context = context;
            this.totals = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<String, byte[]> record) {
            JsonNode order = decode(record.value());
            String customer = order.get("customer").asText();
            Long before = totals.get(customer);
            long sum = (before == null ? 0 : before) + order.get("total").asLong();
            totals.put(customer, sum);
            ObjectNode total = JSON.createObjectNode();
            total.put("customer", customer).put("sum", sum).put("ts", order.get("ts").asLong());
            context.forward(record.withKey(customer).withValue(encode(total)));
        }
    }

    static byte[] result(String customer, long start, long count) {
        ObjectNode node = JSON.createObjectNode();
        node.put("customer", customer).put("start", start).put("count", count);
        return encode(node);
    }

    static void totals(StreamsBuilder builder, String input, String output) {
        builder.addStateStore(
            Stores.keyValueStoreBuilder(Stores.inMemoryKeyValueStore(STORE), Serdes.String(), Serdes.Long()));
        builder.stream(input, Consumed.with(Serdes.String(), Serdes.ByteArray()))
            .process(Adder::new, STORE)
            .to(output, Produced.with(Serdes.String(), Serdes.ByteArray()));
    }

    static void counts(StreamsBuilder builder, String input, String output) {
        Serde<JsonNode> json = Serdes.serdeFrom((topic, node) -> encode(node), (topic, bytes) -> decode(bytes));
        builder.stream(input, Consumed.with(Serdes.String(), json).withTimestampExtractor((record, before) -> {
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
            .to(output, Produced.with(Serdes.String(), Serdes.ByteArray()));
    }

    public static void main(String[] args) {
        String work = args[0], input = args[2], output = args[3];
        Properties settings = new Properties();
        settings.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, args[1]);
        settings.put(StreamsConfig.APPLICATION_ID_CONFIG, output + "-streams");
        settings.put(StreamsConfig.STATE_DIR_CONFIG, args[4]);
        settings.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        settings.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, 500);
        settings.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, 1);
        settings.put(StreamsConfig.STATESTORE_CACHE_MAX_BYTES_CONFIG, 0);
        settings.put(StreamsConfig.InternalConfig.EMIT_INTERVAL_MS_KSTREAMS_WINDOWED_AGGREGATION, 0L);  // counts alone
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
        settings.put(StreamsConfig.producerPrefix(ProducerConfig.LINGER_MS_CONFIG), 5);
        StreamsBuilder builder = new StreamsBuilder();
        if (work.equals("totals")) {
            totals(builder, input, output);
        } else {
            counts(builder, input, output);
        }
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.start();
    }
}
