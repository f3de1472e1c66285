import com.fasterxml.jackson.annotation.JsonPropertyOrder;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import com.fasterxml.jackson.databind.ObjectWriter;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.time.Duration;
import java.util.Properties;
import java.util.function.ToLongFunction;
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
import org.apache.kafka.streams.kstream.JoinWindows;
import org.apache.kafka.streams.kstream.KStream;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.kstream.StreamJoined;
import org.apache.kafka.streams.kstream.TimeWindows;
import org.apache.kafka.streams.processor.PunctuationType;
import org.apache.kafka.streams.processor.api.Processor;
import org.apache.kafka.streams.processor.api.ProcessorContext;
import org.apache.kafka.streams.processor.api.Record;
import org.apache.kafka.streams.state.KeyValueIterator;
import org.apache.kafka.streams.state.KeyValueStore;
import org.apache.kafka.streams.state.Stores;

/** Pipelines on Kafka Streams, exactly once: java -cp JARS StreamsPipelines WORK SERVERS INPUTS OUTPUT FOLDER
 * WORK is one of those in work.py. Stores are in memory but for the join, with changelogs. */
class StreamsPipelines {
    static final String STORE = "store";
    static final Duration SIZE = Duration.ofSeconds(10);
    static final Duration GRACE = Duration.ofSeconds(2);
    /** Longer than SIZE and GRACE: a store drops windows before they are emitted, if time jumps further than this. */
    static final Duration RETENTION = Duration.ofMinutes(1);
    static final Duration PAID_WITHIN = Duration.ofSeconds(5);
    static final Duration REMEMBERED = Duration.ofHours(1);

    public static class Order {
        public long id;
        public String customer;
        public long total;
        public long ts;
    }

    public static class Payment {
        public long id;
        public long order;
        public long amount;
        public long ts;
    }

    @JsonPropertyOrder({"customer", "sum", "ts"})
    public record Total(String customer, long sum, long ts) {}

    @JsonPropertyOrder({"customer", "start", "count"})
    public record Counted(String customer, long start, long count) {}

    @JsonPropertyOrder({"order", "customer", "total", "amount"})
    public record Paid(long order, String customer, long total, long amount) {}

    static <T> Serde<T> json(Class<T> type) {
        ObjectMapper mapper = new ObjectMapper();
        ObjectReader reader = mapper.readerFor(type);
        ObjectWriter writer = mapper.writerFor(type);
        return Serdes.serdeFrom((topic, value) -> {
            try {
                return writer.writeValueAsBytes(value);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }, (topic, bytes) -> {
            try {
                return reader.readValue(bytes);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        });
    }

    static final Serde<Order> ORDER = json(Order.class);

    /** The event time of a record: its number in ms, less up to 1.5 s. */
    static long eventMs(long id) {
        return id + 2000 - id * 7919 % 1500;
    }

    static <T> KStream<String, T> read(StreamsBuilder builder, String topic, Serde<T> serde, ToLongFunction<T> id) {
        return builder.stream(topic, Consumed.with(Serdes.String(), serde).withTimestampExtractor((record, before) -> {
            @SuppressWarnings("unchecked")
            T value = (T) record.value();
            return eventMs(id.applyAsLong(value));
        }));
    }

    static class Adder implements Processor<String, Order, String, Total> {
        private ProcessorContext<String, Total> context;
        private KeyValueStore<String, Long> totals;

        @Override
        public void init(ProcessorContext<String, Total> context) {
            this.context = context;
            this.totals = context.getStateStore(STORE);
        }

        @Override
        public void process(Record<String, Order> record) {
            Order order = record.value();
            Long before = totals.get(order.customer);
            long sum = (before == null ? 0 : before) + order.total;
            totals.put(order.customer, sum);
            context.forward(record.withKey(order.customer).withValue(new Total(order.customer, sum, order.ts)));
        }
    }

    static class First implements Processor<String, Order, String, Order> {
        private ProcessorContext<String, Order> context;
        private KeyValueStore<Long, Long> seen;

        @Override
        public void init(ProcessorContext<String, Order> context) {
            this.context = context;
            this.seen = context.getStateStore(STORE);
            context.schedule(REMEMBERED.dividedBy(6), PunctuationType.STREAM_TIME, this::forget);
        }

        @Override
        public void process(Record<String, Order> record) {
            Long before = seen.get(record.value().id);
            if (before == null || Math.abs(record.timestamp() - before) >= REMEMBERED.toMillis()) {
                seen.put(record.value().id, record.timestamp());
                context.forward(record);
            }
        }

        private void forget(long now) {
            try (KeyValueIterator<Long, Long> all = seen.all()) {
                while (all.hasNext()) {
                    KeyValue<Long, Long> entry = all.next();
                    if (entry.value <= now - REMEMBERED.toMillis()) {
                        seen.delete(entry.key);
                    }
                }
            }
        }
    }

    static void totals(StreamsBuilder builder, String input, String output) {
        builder.addStateStore(
            Stores.keyValueStoreBuilder(Stores.inMemoryKeyValueStore(STORE), Serdes.String(), Serdes.Long()));
        builder.stream(input, Consumed.with(Serdes.String(), ORDER))
            .process(Adder::new, STORE)
            .to(output, Produced.with(Serdes.String(), json(Total.class)));
    }

    static void counts(StreamsBuilder builder, String input, String output) {
        read(builder, input, ORDER, order -> order.id)
            .groupByKey(Grouped.with(Serdes.String(), ORDER))
            .windowedBy(TimeWindows.ofSizeAndGrace(SIZE, GRACE))
            .emitStrategy(EmitStrategy.onWindowClose())
            .count(Materialized.<String, Long>as(Stores.inMemoryWindowStore(STORE, RETENTION, SIZE, false))
                .withKeySerde(Serdes.String()).withValueSerde(Serdes.Long()))
            .toStream()
            .map((at, count) -> KeyValue.pair(at.key(), new Counted(at.key(), at.window().start(), count)))
            .to(output, Produced.with(Serdes.String(), json(Counted.class)));
    }

    /** In RocksDB, the default: windows in memory are searched time by time. */
    static void payments(StreamsBuilder builder, String input, String other, String output) {
        Serde<Payment> payment = json(Payment.class);
        read(builder, input, ORDER, order -> order.id)
            .join(read(builder, other, payment, paid -> paid.id),
                (order, paid) -> new Paid(order.id, order.customer, order.total, paid.amount),
                JoinWindows.ofTimeDifferenceAndGrace(PAID_WITHIN, GRACE).before(Duration.ZERO),
                StreamJoined.with(Serdes.String(), ORDER, payment))
            .selectKey((id, paid) -> paid.customer)
            .to(output, Produced.with(Serdes.String(), json(Paid.class)));
    }

    static void once(StreamsBuilder builder, String input, String output) {
        builder.addStateStore(
            Stores.keyValueStoreBuilder(Stores.inMemoryKeyValueStore(STORE), Serdes.Long(), Serdes.Long()));
        read(builder, input, ORDER, order -> order.id)
            .process(First::new, STORE)
            .to(output, Produced.with(Serdes.String(), ORDER));
    }

    public static void main(String[] args) {
        String[] inputs = args[2].split(",");
        String output = args[3];
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
        switch (args[0]) {
            case "totals" -> totals(builder, inputs[0], output);
            case "counts" -> counts(builder, inputs[0], output);
            case "payments" -> payments(builder, inputs[0], inputs[1], output);
            case "once" -> once(builder, inputs[0], output);
            default -> throw new IllegalArgumentException(args[0]);
        }
        KafkaStreams streams = new KafkaStreams(builder.build(), settings);
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.start();
    }
}
