/* A device of torch's, in the memory and the streams of the stand-in for the CUDA driver.

   An operator runs on the CPU, on copies of its arguments; what it has written is copied to the
   device without waiting, on the current stream. So the stand-in sees whatever is not ordered by
   streams and events, and ends the process where the host touches a tensor's memory. */
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_native_batch_norm_legit.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <dlfcn.h>

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

using Address = unsigned long long;

/* The driver's functions, in the order of `names`. */
struct Driver {
    int (*Init)(unsigned);
    int (*PrimaryContextRetain)(void **, int);
    int (*SetCurrent)(void *);
    int (*MemAlloc)(Address *, size_t);
    int (*MemHostAlloc)(void **, size_t, unsigned);
    int (*StreamCreate)(void **, unsigned, int);
    int (*StreamSynchronize)(void *);
    int (*StreamQuery)(void *);
    int (*StreamWaitEvent)(void *, void *, unsigned);
    int (*EventCreate)(void **, unsigned);
    int (*EventRecord)(void *, void *);
    int (*EventQuery)(void *);
    int (*EventSynchronize)(void *);
    int (*EventDestroy)(void *);
    int (*ToHost)(void *, Address, size_t, void *);
    int (*ToDevice)(Address, const void *, size_t, void *);
    int (*OnDevice)(Address, Address, size_t, void *);
    int (*MemFree)(Address);
} driver;
const char *names[] = {
    "cuInit", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemHostAlloc",
    "cuStreamCreateWithPriority", "cuStreamSynchronize", "cuStreamQuery", "cuStreamWaitEvent",
    "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuEventSynchronize", "cuEventDestroy_v2",
    "cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoDAsync_v2", "cuMemFree_v2",
};

void *context;
std::vector<void *> streams{nullptr}; /* 0 is the legacy default stream */
thread_local int current = 0;
thread_local int depth = 0;     /* of operators that run on the CPU */

/* Tests read them, in this order. `reads`: times that a program, not an operator, has read a tensor
   on the host. `waits`, `pinned`: calls that block the host, and bytes, which are there only because
   operators run on the CPU. `bytes`, `peak`: of tensors' memory now, and at most. */
struct {
    std::atomic<long long> reads{0}, waits{0}, pinned{0}, bytes{0}, peak{0};
} counts;
void count_bytes(long long size) {
    long long now = counts.bytes += size, peak = counts.peak;
    while (now > peak && !counts.peak.compare_exchange_weak(peak, now))
        ;
}

void check(int result) { TORCH_CHECK(result == 0, "CUDA error ", result); }
void *stream() {
    driver.SetCurrent(context); /* torch's backward pass has threads of its own */
    return streams[current];
}

/* Memory is kept for the next of its size on its stream: freeing it would wait for the device. */
struct Kept {
    std::multimap<std::pair<int, size_t>, void *> of;
    std::unordered_map<void *, std::pair<int, size_t>> places;
    std::mutex lock;
    void *take(std::pair<int, size_t> place) {
        std::lock_guard<std::mutex> guard(lock);
        auto found = of.find(place);
        if (found == of.end())
            return nullptr;
        void *memory = found->second;
        of.erase(found);
        return memory;
    }
    void note(void *memory, std::pair<int, size_t> place) {
        std::lock_guard<std::mutex> guard(lock);
        places[memory] = place;
    }
    std::multimap<std::pair<int, size_t>, void *> take_all() {
        std::lock_guard<std::mutex> guard(lock);
        return std::exchange(of, {});
    }
    size_t give(void *memory) {
        std::lock_guard<std::mutex> guard(lock);
        of.emplace(places[memory], memory);
        return places[memory].second;
    }
};
Kept &device_memory = *new Kept, &pinned_memory = *new Kept; /* tensors outlive static objects */

void free_tensor(void *memory) {
    if (memory)
        count_bytes(-(long long)device_memory.give(memory));
}

struct Allocator final : at::Allocator {
    at::DataPtr allocate(size_t size) override {
        stream();
        std::pair<int, size_t> place{current, size};
        void *memory = size ? device_memory.take(place) : nullptr;
        if (size && !memory) {
            Address address;
            check(driver.MemAlloc(&address, size));
            device_memory.note(memory = (void *)address, place);
        }
        count_bytes(size);
        return {memory, memory, free_tensor, at::Device(at::kPrivateUse1, 0)};
    }
    at::DeleterFnPtr raw_deleter() const override { return free_tensor; }
    void copy_data(void *to, const void *from, size_t size) const override {
        check(driver.OnDevice((Address)to, (Address)from, size, stream()));
    }
} allocator;

void *pinned(size_t size) {
    stream();
    std::pair<int, size_t> place{0, (size + 4095) / 4096 * 4096};
    void *memory = pinned_memory.take(place);
    if (!memory) {
        counts.waits++;
        counts.pinned += place.second;
        check(driver.MemHostAlloc(&memory, place.second, 0));
        pinned_memory.note(memory, place);
    }
    return memory;
}

/* What copies to the device read until they have ended. */
struct Upload {
    void *memory, *event;
};
std::vector<Upload> uploads;
std::mutex uploads_lock;
void finish_uploads() {
    for (size_t i = uploads.size(); i-- > 0;)
        if (driver.EventQuery(uploads[i].event) == 0) {
            pinned_memory.give(uploads[i].memory);
            driver.EventDestroy(uploads[i].event);
            uploads.erase(uploads.begin() + i);
        }
}

/* The bytes of its storage that a tensor may touch: from, to. */
std::pair<int64_t, int64_t> extent(const at::Tensor &tensor) {
    int64_t last = 0;
    for (int i = 0; i < tensor.dim(); i++) {
        if (tensor.size(i) == 0)
            return {0, 0};
        last += (tensor.size(i) - 1) * tensor.stride(i);
    }
    int64_t begin = tensor.storage_offset() * tensor.itemsize();
    return {begin, begin + (last + 1) * tensor.itemsize()};
}

at::Tensor view_of(const at::Tensor &bytes, const at::Tensor &like) {
    auto view = at::detail::make_tensor<at::TensorImpl>(
        c10::Storage(bytes.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), like.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    return view;
}

/* A tensor on the CPU with the values, sizes and strides of one on the device; the host waits. */
at::Tensor download(const at::Tensor &tensor) {
    auto [begin, end] = extent(tensor);
    auto bytes = at::empty({std::max<int64_t>(end - begin, 1)}, at::kByte);
    if (begin < end) {
        void *memory = pinned(end - begin);
        check(driver.ToHost(memory, (Address)tensor.storage().data() + begin, end - begin, stream()));
        counts.waits++;
        check(driver.StreamSynchronize(stream()));
        memcpy(bytes.data_ptr(), memory, end - begin);
        pinned_memory.give(memory);
    }
    return view_of(bytes, tensor);
}

/* Copy what has the sizes and strides of a tensor to it. */
void upload(const at::Tensor &host, const at::Tensor &tensor) {
    auto [begin, end] = extent(tensor);
    if (begin == end)
        return;
    std::lock_guard<std::mutex> guard(uploads_lock);
    finish_uploads();
    void *event, *memory = pinned(end - begin);
    memcpy(memory, host.data_ptr(), end - begin);
    check(driver.ToDevice((Address)tensor.storage().data() + begin, memory, end - begin, stream()));
    check(driver.EventCreate(&event, 2));
    check(driver.EventRecord(event, stream()));
    uploads.push_back({memory, event});
}

/* Operators */

at::Tensor copy_from(const at::Tensor &from, const at::Tensor &to, bool) {
    bool same = from.dtype() == to.dtype() && from.sizes() == to.sizes();
    bool dense = same && from.is_contiguous() && to.is_contiguous();
    if (from.is_privateuseone() && to.is_privateuseone() && dense) {
        if (from.numel())
            check(driver.OnDevice((Address)to.data_ptr(), (Address)from.data_ptr(), from.nbytes(),
                                  stream()));
        return to;
    }
    if (!to.is_privateuseone()) {
        counts.reads += depth == 0;
        to.copy_(download(from));
        return to;
    }
    auto source = from.is_privateuseone() ? download(from) : from;
    if (dense) {
        upload(source, to);
        return to;
    }
    auto host = download(to);
    host.copy_(source);
    upload(host, to);
    return to;
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(
        C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

const at::Tensor &resize(const at::Tensor &tensor, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat>) {
    auto sizes = C10_AS_INTARRAYREF_SLOW(size);
    auto *impl = tensor.unsafeGetTensorImpl();
    size_t bytes = c10::multiply_integers(sizes) * tensor.itemsize();
    if (bytes > tensor.storage().nbytes()) {
        impl->unsafe_storage().set_data_ptr(allocator.allocate(bytes));
        impl->unsafe_storage().set_nbytes(bytes);
    }
    impl->set_sizes_contiguous(sizes);
    return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor &from, const at::Tensor &to) {
    if (to.sizes() != from.sizes())
        to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Tensor &set_storage(at::Tensor &tensor, at::Storage storage, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    auto *impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset.expect_int());
    impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
    return tensor;
}

at::Tensor &set_whole_storage(at::Tensor &tensor, at::Storage storage) {
    c10::SymInt size = static_cast<int64_t>(storage.nbytes() / tensor.itemsize()), one = 1;
    return set_storage(tensor, std::move(storage), 0, size, one);
}

at::Scalar item(const at::Tensor &tensor) {
    counts.reads += depth == 0;
    return at::_local_scalar_dense(download(tensor));
}

at::Tensor view(const at::Tensor &tensor, c10::SymIntArrayRef size) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor as_strided(const at::Tensor &tensor, c10::SymIntArrayRef size,
                      c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
    return at::native::as_strided_tensorimpl(
        tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
        offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor reshape_alias(const at::Tensor &tensor, c10::SymIntArrayRef size,
                         c10::SymIntArrayRef stride) {
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                      C10_AS_INTARRAYREF_SLOW(stride));
}

/* Convolutions have no fallback. */
using Numbers = c10::SymIntArrayRef;
at::Tensor convolution(const at::Tensor &input, const at::Tensor &weight,
                       const std::optional<at::Tensor> &bias, Numbers stride, Numbers padding,
                       Numbers dilation, bool transposed, Numbers output_padding,
                       c10::SymInt groups) {
    auto added = bias && bias->defined() ? std::optional(download(*bias)) : std::nullopt;
    return at::convolution_symint(download(input), download(weight), added, stride, padding,
                                  dilation, transposed, output_padding, groups)
        .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor &gradient, const at::Tensor &input, const at::Tensor &weight, Numbers stride,
    Numbers padding, Numbers dilation, bool transposed, Numbers output_padding, c10::SymInt groups,
    std::array<bool, 3> wanted) {
    std::vector<c10::SymInt> bias{weight.sym_size(0)};
    auto [first, second, third] = at::convolution_backward_symint(
        download(gradient), download(input), download(weight), c10::SymIntArrayRef(bias), stride,
        padding, dilation, transposed, output_padding, groups, wanted);
    auto on_device = [&](const at::Tensor &each) {
        return each.defined() ? each.to(input.device()) : each;
    };
    return {on_device(first), on_device(second), on_device(third)};
}

/* Its schema does not say that it changes the running statistics. */
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(
    const at::Tensor &input, const std::optional<at::Tensor> &weight,
    const std::optional<at::Tensor> &bias, const std::optional<at::Tensor> &mean,
    const std::optional<at::Tensor> &variance, bool training, double momentum, double epsilon) {
    if (!mean || !mean->defined())
        return at::_native_batch_norm_legit(input, weight, bias, training, momentum, epsilon);
    at::Tensor running_mean = *mean, running_variance = *variance;
    return at::_native_batch_norm_legit(input, weight, bias, running_mean, running_variance,
                                        training, momentum, epsilon);
}

void run_on_cpu(const c10::OperatorHandle &operation, torch::jit::Stack *stack) {
    struct Inside {
        Inside() { depth++; }
        ~Inside() { depth--; }
    } inside;
    at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("resize_", resize);
    library.impl("set_.source_Storage_storage_offset", set_storage);
    library.impl("set_.source_Storage", set_whole_storage);
    library.impl("_copy_from", copy_from);
    library.impl("_copy_from_and_resize", copy_from_and_resize);
    library.impl("_local_scalar_dense", item);
    library.impl("convolution_overrideable", convolution);
    library.impl("convolution_backward_overrideable", convolution_backward);
    library.impl("native_batch_norm", batch_norm);
    library.impl("view", view);
    library.impl("as_strided", as_strided);
    library.impl("_reshape_alias", reshape_alias);
}

/* Streams and events */

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::Device device() const { return {at::kPrivateUse1, 0}; }
    c10::Stream of(int id) const { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
    at::DeviceType type() const override { return at::kPrivateUse1; }
    c10::Device exchangeDevice(c10::Device) const override { return device(); }
    c10::Device getDevice() const override { return device(); }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    c10::Stream getStream(c10::Device) const override { return of(current); }
    c10::Stream getDefaultStream(c10::Device) const override { return of(0); }
    c10::Stream getNewStream(c10::Device, int) const override {
        void *created;
        stream();
        check(driver.StreamCreate(&created, 1, 0));
        streams.push_back(created);
        return of(streams.size() - 1);
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        auto before = of(current);
        current = next.id();
        return before;
    }
    void *getStreamNativeHandle(const c10::Stream of) const override { return streams[of.id()]; }
    void destroyEvent(void *event, const c10::DeviceIndex) const noexcept override {
        if (event)
            driver.EventDestroy(event);
    }
    void record(void **event, const c10::Stream &of, const c10::DeviceIndex,
                const c10::EventFlag) const override {
        stream();
        if (!*event)
            check(driver.EventCreate(event, 2));
        check(driver.EventRecord(*event, streams[of.id()]));
    }
    void block(void *event, const c10::Stream &of) const override {
        stream();
        if (event)
            check(driver.StreamWaitEvent(streams[of.id()], event, 0));
    }
    bool queryEvent(void *event) const override {
        stream();
        return !event || driver.EventQuery(event) == 0;
    }
    bool queryStream(const c10::Stream &of) const override {
        stream();
        return driver.StreamQuery(streams[of.id()]) == 0;
    }
    void synchronizeStream(const c10::Stream &of) const override {
        stream();
        check(driver.StreamSynchronize(streams[of.id()]));
    }
    void synchronizeEvent(void *event) const override {
        stream();
        if (event)
            check(driver.EventSynchronize(event));
    }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        stream();
        for (auto each : streams)
            check(driver.StreamSynchronize(each));
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
    void setCurrentDevice(c10::DeviceIndex) const override {}
};

} // namespace

/* Use the driver in this library; return what has gone wrong, or null. */
extern "C" const char *torch_device_start(const char *path) {
    void *library = dlopen(path, RTLD_NOW);
    if (!library)
        return dlerror();
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(((void **)&driver)[i] = dlsym(library, names[i])))
            return names[i];
    if (driver.Init(0) || driver.PrimaryContextRetain(&context, 0))
        return "the driver has no device";
    c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return nullptr;
}

extern "C" void torch_device_counts(long long *copy) {
    for (auto *count : {&counts.reads, &counts.waits, &counts.pinned, &counts.bytes, &counts.peak})
        *copy++ = *count;
}
/* Free the memory that is kept. */
extern "C" void torch_device_empty_cache() {
    stream();
    for (auto &kept : device_memory.take_all())
        driver.MemFree((Address)kept.second);
}
/* Let the peak be what there is now. */
extern "C" void torch_device_reset_peak() { counts.peak = counts.bytes.load(); }
