import com.fasterxml.jackson.annotation.JsonPropertyOrder;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.ObjectReader;
import java.io.IOException;
import java.io.Serializable;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.function.Function;
import java.util.function.ToLongFunction;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFilterFunction;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.serialization.AbstractDeserializationSchema;
import org.apache.flink.api.common.serialization.SerializationSchema;
import org.apache.flink.api.common.state.StateTtlConfig;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.configuration.CheckpointingOptions;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.configuration.PipelineOptions;
import org.apache.flink.configuration.RestartStrategyOptions;
import org.apache.flink.configuration.StateBackendOptions;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.sink.TransactionNamingStrategy;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.core.execution.CheckpointingMode;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/** Pipelines on Flink's DataStream API, exactly once: java -cp JARS FlinkPipelines WORK SERVERS INPUTS OUTPUT FOLDER
 * WORK is one of those in work.py. A local cluster of one slot; checkpoints every 500 ms, of a hash map, into FOLDER. */
class FlinkPipelines {
    static final Duration DISORDER = Duration.ofSeconds(2);

    static final Duration SIZE = Duration.ofSeconds(10);
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

    static class Decoder<T> extends AbstractDeserializationSchema<T> {
        private final Class<T> type;
        private transient ObjectReader reader;

        Decoder(Class<T> type) {
            super(type);
            this.type = type;
        }

        @Override
        public void open(InitializationContext context) {
            reader = new ObjectMapper().readerFor(type);
        }

        @Override
        public T deserialize(byte[] value) throws IOException {
            return reader.readValue(value);
        }
    }

    static class Encoder<T> implements SerializationSchema<T> {
        private transient ObjectMapper mapper;

        @Override
        public void open(InitializationContext context) {
            mapper = new ObjectMapper();
        }

        @Override
        public byte[] serialize(T value) {
            try {
                return mapper.writeValueAsBytes(value);
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    interface KeyOf<T> extends Function<T, String>, Serializable {}

    static class Adder extends RichMapFunction<Order, Total> {
        private transient ValueState<Long> sum;

        @Override
        public void open(OpenContext context) {
            sum = getRuntimeContext().getState(new ValueStateDescriptor<>("sum", Long.class));
        }

        @Override
        public Total map(Order order) throws IOException {
            Long before = sum.value();
            long total = (before == null ? 0 : before) + order.total;
            sum.update(total);
            return new Total(order.customer, total, order.ts);
        }
    }

    static class Count implements AggregateFunction<Order, Long, Long> {
        @Override
        public Long createAccumulator() {
            return 0L;
        }

        @Override
        public Long add(Order order, Long count) {
            return count + 1;
        }

        @Override
        public Long getResult(Long count) {
            return count;
        }

        @Override
        public Long merge(Long one, Long other) {
            return one + other;
        }
    }

    static class Named extends ProcessWindowFunction<Long, Counted, String, TimeWindow> {
        @Override
        public void process(String customer, Context context, Iterable<Long> counts, Collector<Counted> out) {
            out.collect(new Counted(customer, context.window().getStart(), counts.iterator().next()));
        }
    }

    static class Pay extends ProcessJoinFunction<Order, Payment, Paid> {
        @Override
        public void processElement(Order order, Payment payment, Context context, Collector<Paid> out) {
            out.collect(new Paid(order.id, order.customer, order.total, payment.amount));
        }
    }

    static class First extends RichFilterFunction<Order> {
        private transient ValueState<Boolean> seen;

        @Override
        public void open(OpenContext context) {
            ValueStateDescriptor<Boolean> descriptor = new ValueStateDescriptor<>("seen", Boolean.class);
            descriptor.enableTimeToLive(StateTtlConfig.newBuilder(REMEMBERED).build());
            seen = getRuntimeContext().getState(descriptor);
        }

        @Override
        public boolean filter(Order order) throws IOException {
            if (seen.value() != null) {
                return false;
            }
            seen.update(true);
            return true;
        }
    }

    /** The event time of a record: its number in ms, less up to 1.5 s. */
    static long eventMs(long id) {
        return id + 2000 - id * 7919 % 1500;
    }

    interface IdOf<T> extends ToLongFunction<T>, Serializable {}

    static <T> WatermarkStrategy<T> timed(IdOf<T> id) {
        return WatermarkStrategy.<T>forBoundedOutOfOrderness(DISORDER)
            .withTimestampAssigner((record, before) -> eventMs(id.applyAsLong(record)));
    }

    final StreamExecutionEnvironment environment;
    final String servers;
    final String output;

    FlinkPipelines(StreamExecutionEnvironment environment, String servers, String output) {
        this.environment = environment;
        this.servers = servers;
        this.output = output;
    }

    <T> DataStream<T> read(String topic, Class<T> type, WatermarkStrategy<T> watermarks) {
        KafkaSource<T> source = KafkaSource.<T>builder()
            .setBootstrapServers(servers)
            .setTopics(topic)
            .setGroupId(output)
            .setStartingOffsets(OffsetsInitializer.earliest())
            .setValueOnlyDeserializer(new Decoder<>(type))
            .build();
        return environment.fromSource(source, watermarks, topic);
    }

    <T> void write(DataStream<T> results, KeyOf<T> key) {
        results.sinkTo(KafkaSink.<T>builder()
            .setBootstrapServers(servers)
            .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
            .setTransactionalIdPrefix(output)
            .setTransactionNamingStrategy(TransactionNamingStrategy.POOLING)
            .setProperty("transaction.timeout.ms", "600000")  // at most the broker's 15 min
            .setProperty("linger.ms", "5")
            .setRecordSerializer(KafkaRecordSerializationSchema.<T>builder()
                .setTopic(output)
                .setKeySerializationSchema((T result) -> key.apply(result).getBytes(StandardCharsets.UTF_8))
                .setValueSerializationSchema(new Encoder<>())
                .build())
            .build());
    }

    void totals(String input) {
        DataStream<Order> orders = read(input, Order.class, WatermarkStrategy.noWatermarks());
        write(orders.keyBy(order -> order.customer).map(new Adder()), Total::customer);
    }

    void counts(String input) {
        DataStream<Order> orders = read(input, Order.class, timed(order -> order.id));
        DataStream<Counted> counts = orders.keyBy(order -> order.customer)
            .window(TumblingEventTimeWindows.of(SIZE))
            .aggregate(new Count(), new Named());
        write(counts, Counted::customer);
    }

    void payments(String input, String other) {
        DataStream<Order> orders = read(input, Order.class, timed(order -> order.id));
        DataStream<Payment> payments = read(other, Payment.class, timed(payment -> payment.id));
        DataStream<Paid> paid = orders.keyBy(order -> order.id)
            .intervalJoin(payments.keyBy(payment -> payment.order))
            .between(Duration.ZERO, PAID_WITHIN)
            .process(new Pay());
        write(paid, Paid::customer);
    }

    void once(String input) {
        DataStream<Order> orders = read(input, Order.class, timed(order -> order.id));
        write(orders.keyBy(order -> order.id).filter(new First()), order -> order.customer);
    }

    public static void main(String[] args) throws Exception {
        String[] inputs = args[2].split(",");
        Configuration settings = new Configuration();
        settings.set(StateBackendOptions.STATE_BACKEND, "hashmap");
        settings.set(CheckpointingOptions.CHECKPOINT_STORAGE, "filesystem");
        settings.set(CheckpointingOptions.CHECKPOINTS_DIRECTORY, "file://" + args[4]);
        settings.set(CheckpointingOptions.CHECKPOINTING_INTERVAL, Duration.ofMillis(500));
        settings.set(CheckpointingOptions.CHECKPOINTING_CONSISTENCY_MODE, CheckpointingMode.EXACTLY_ONCE);
        settings.set(PipelineOptions.OBJECT_REUSE, true);
        settings.set(PipelineOptions.GENERIC_TYPES, false);
        settings.set(RestartStrategyOptions.RESTART_STRATEGY, "none");
        StreamExecutionEnvironment environment = StreamExecutionEnvironment.createLocalEnvironment(1, settings);
        FlinkPipelines pipelines = new FlinkPipelines(environment, args[1], args[3]);
        switch (args[0]) {
            case "totals" -> pipelines.totals(inputs[0]);
            case "counts" -> pipelines.counts(inputs[0]);
            case "payments" -> pipelines.payments(inputs[0], inputs[1]);
            case "once" -> pipelines.once(inputs[0]);
            default -> throw new IllegalArgumentException(args[0]);
        }
        environment.execute();
    }
}
