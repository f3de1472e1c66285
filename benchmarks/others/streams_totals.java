import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.Properties;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;

/** A running total per customer on Kafka Streams, exactly once: java -cp JARS streams_totals.java SERVERS INPUT OUTPUT FOLDER */
public class Totals {
    static final String STORE = "totals";

    static class Adder implements Processor<String, byte[], String, byte[]> {
        private final ObjectMapper json = new ObjectMapper();
        private ProcessorContext<String, byte[]> context;
        private KeyValueStore<String, Long> totals;

        @Override
        public void init(ProcessorContext<String, byte[]> context) {
            this.context = context;
            this.totals = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<String, byte[]> record) {
            try {
                JsonNode order = json.readTree(record.value());
                String customer = order.get("customer").asText();
                Long before = totals.get(customer);
                long sum = (before == null ? 0 : before) + order.get("total").asLong();
                totals.put(customer, sum);
                ObjectNode total = json.createObjectNode();
                total.put("customer", customer).put("sum", sum).put("ts", order.get("ts").asLong());
                context.forward(record.withKey(customer).withValue(json.writeValueAsBytes(total)));
            } catch (java.io.IOException error) {
                throw new java.io.UncheckedIOException(error);
            }
        }
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
        settings.put(StreamsConfig.consumerPrefix(ConsumerConfig.AUTO_OFFSET_RESET_CONFIG), "earliest");
        settings.put(StreamsConfig.producerPrefix(ProducerConfig.LINGER_MS_CONFIG), 5);
        StreamsBuilder builder = new StreamsBuilder();
        builder.addStateStore(
            Stores.keyValueStoreBuilder(Stores.inMemoryKeyValueStore(STORE), Serdes.String(), Serdes.Long()));
        builder.stream(args[1], Consumed.with(Serdes.String(), Serdes.ByteArray()))
            .process(Adder::new, STORE)
            .to(args[2], Produced.with(Serdes.String(), Serdes.ByteArray()));
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.start();
    }
}
