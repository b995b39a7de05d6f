// An emulated NPU: torch's PrivateUse1 device in host memory, whose streams run late.
//
// An operation is put into the queue of its thread's stream and runs when somebody waits: a
// synchronisation, a copy to the host, a number for the host. A drawn part of the other streams runs
// before (NPU_SEED), so work that no event orders comes early in one run and late in another. A
// thread that has not called set_device may neither allocate nor launch. A process enters one device,
// as each rank of vLLM does: on a card, a second one would take memory of another rank's. A device
// address is one that the host cannot touch: its bytes lie elsewhere (`DeviceBlock`). Operations take
// tensors of the device alone, but for indices and numbers. Memory of the host is pinned if CANN's
// runtime (`cann.cpp`) has allocated it; a copy from other memory takes its bytes at once.

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>

extern "C" {  // of cann.cpp
int aclrtSetDevice(int32_t index);
int aclrtMallocHost(void** memory, size_t nbytes);
int aclrtFreeHost(void* memory);
bool npu_knows_host(const void* address);
}

namespace {

using at::Tensor;
constexpr auto NPU = c10::DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 2 << 20;  // of HCCS's page tables; an address below is no device's

// Streams

struct Task {
    std::function<void()> run;
    int64_t event = -1;  // recorded here, or waited for if `run` is empty and `waits`
    bool waits = false;
};

std::recursive_mutex mutex;  // of all below

// Holds the mutex. A thread that waits for it has let Python's lock go: whoever holds the mutex may
// need that lock to free a tensor.
struct Held {
    Held() {
        if (!PyGILState_Check()) {
            mutex.lock();
            return;
        }
        pybind11::gil_scoped_release released;
        mutex.lock();
    }
    ~Held() { mutex.unlock(); }
};

std::map<int64_t, std::deque<Task>> queues;
std::map<int64_t, int64_t> recorded_on;  // pending event -> stream
std::mt19937 drawn(std::getenv("NPU_SEED") ? std::atoi(std::getenv("NPU_SEED")) : 0);
bool is_late = !(std::getenv("NPU_LATE") && std::string(std::getenv("NPU_LATE")) == "0");
int64_t next_stream = 1, next_event = 1;
std::map<std::string, int64_t> counts;

int64_t device_count() {
    const char* count = std::getenv("NPU_COUNT");
    return count ? std::atoi(count) : 8;
}

std::atomic<int64_t> entered_device{-1};  // the process's, from its first set_device on
thread_local bool has_entered = false;
thread_local c10::DeviceIndex this_device = 0;
thread_local std::map<c10::DeviceIndex, int64_t> this_stream;

int64_t current_stream() { return this_stream[this_device]; }

// The default streams of devices are numbered below zero.
int64_t key_of(c10::DeviceIndex device, int64_t stream) { return stream ? stream : -1 - device; }

void check_thread(const char* what) {
    TORCH_CHECK(has_entered, "this thread has not called torch.npu.set_device: ", what);
}

void run_one(int64_t key);

// Runs a stream up to and with the record of `event`; all of it if there is no such record.
void run_up_to(int64_t key, int64_t event) {
    auto& queue = queues[key];
    while (!queue.empty() && (event < 0 || recorded_on.count(event))) run_one(key);
}

void run_one(int64_t key) {
    Task task = std::move(queues[key].front());
    queues[key].pop_front();
    if (task.waits) {
        auto found = recorded_on.find(task.event);
        if (found != recorded_on.end()) run_up_to(found->second, task.event);
    } else if (task.event >= 0) {
        recorded_on.erase(task.event);
    } else {
        c10::InferenceMode plain;  // whichever thread waits
        task.run();
    }
}

// Before a wait: a drawn part of what nobody waits for.
void run_others(int64_t waited) {
    std::vector<int64_t> keys;
    for (auto& [key, queue] : queues)
        if (key != waited && !queue.empty()) keys.push_back(key);
    for (auto key : keys) {
        auto count = drawn() % 4 == 0 ? drawn() % (queues[key].size() + 1) : 0;
        while (count-- > 0 && !queues[key].empty()) run_one(key);
    }
}

void wait_for_stream(int64_t key) {
    Held held;
    run_others(key);
    run_up_to(key, -1);
}

void enqueue(const char* what, std::function<void()> run) {
    check_thread(what);
    Held held;
    counts[what]++;
    auto key = key_of(this_device, current_stream());
    queues[key].push_back({std::move(run)});
    if (!is_late) run_up_to(key, -1);
}

int64_t record(int64_t key) {
    Held held;
    auto event = next_event++;
    recorded_on[event] = key;
    queues[key].push_back({nullptr, event, false});
    return event;
}

void make_wait(int64_t key, int64_t event) {
    Held held;
    queues[key].push_back({nullptr, event, true});
}

bool has_happened(int64_t event) {
    Held held;
    return !recorded_on.count(event);
}

void wait_for_event(int64_t event) {
    Held held;
    auto found = recorded_on.find(event);
    if (found == recorded_on.end()) return;
    auto key = found->second;
    run_others(key);
    run_up_to(key, event);
}

// Memory

std::atomic<int64_t> num_bytes{0};

// Memory of the device: an address range that nobody can touch, and the bytes behind it. The context
// of the device's `DataPtr`.
struct DeviceBlock {
    void* range;
    size_t range_bytes;
    void* bytes;
    int64_t nbytes;
};

void free_device(void* context) {
    auto block = static_cast<DeviceBlock*>(context);
    num_bytes -= block->nbytes;
    munmap(block->range, block->range_bytes);
    std::free(block->bytes);
    delete block;
}

struct DeviceMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        check_thread("memory");
        c10::Device device(NPU, this_device);
        if (nbytes == 0) return {nullptr, device};
        auto alignment = nbytes >= ALIGNMENT ? ALIGNMENT : size_t{1};  // small ones lie in any page
        auto range_bytes = nbytes + alignment;
        auto flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        auto range = mmap(nullptr, range_bytes, PROT_NONE, flags, -1, 0);
        TORCH_CHECK(range != MAP_FAILED, "no addresses");
        void* bytes = nullptr;
        TORCH_CHECK(posix_memalign(&bytes, 64, nbytes) == 0, "no memory");
        num_bytes += nbytes;
        auto block = new DeviceBlock{range, range_bytes, bytes, static_cast<int64_t>(nbytes)};
        auto address = (reinterpret_cast<uintptr_t>(range) + alignment - 1) / alignment * alignment;
        return {reinterpret_cast<void*>(address), block, &free_device, device};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
    void copy_data(void*, const void*, size_t) const override {
        TORCH_CHECK(false, "an address of the device has no bytes");
    }
};

// The bytes behind a storage of the device; null without any.
void* bytes_of(const c10::Storage& storage) {
    auto block = static_cast<DeviceBlock*>(storage.data_ptr().get_context());
    return block ? block->bytes : nullptr;
}

constexpr size_t PINNED_OFFSET = 64;  // torch's own allocator gives parts of larger pieces

void free_pinned(void* memory) { aclrtFreeHost(static_cast<char*>(memory) - PINNED_OFFSET); }

struct PinnedMemory final : c10::Allocator {
    c10::DataPtr allocate(size_t nbytes) override {
        check_thread("pinned memory");
        void* memory = nullptr;
        TORCH_CHECK(!aclrtMallocHost(&memory, nbytes + PINNED_OFFSET), "no memory");
        memory = static_cast<char*>(memory) + PINNED_OFFSET;
        return {memory, memory, &free_pinned, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
    void copy_data(void* to, const void* from, size_t count) const override {
        std::memcpy(to, from, count);
    }
};

bool is_pinned(const void* address) { return npu_knows_host(address); }

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(NPU, &device_memory);

struct Hooks final : at::PrivateUse1HooksInterface {
    at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
    bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    bool isAvailable() const override { return true; }
    bool isBuilt() const override { return true; }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::make_generator<at::CPUGeneratorImpl>();
    }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        return at::detail::getDefaultCPUGenerator();
    }
    at::Device getDeviceFromPtr(void*) const override { return {NPU, this_device}; }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
        auto memory = device_memory.allocate(nbytes);
        wait_for_stream(key_of(this_device, current_stream()));
        auto block = static_cast<DeviceBlock*>(memory.get_context());
        if (auto bytes = bytes_of(storage); bytes && block)
            std::memcpy(block->bytes, bytes, std::min(nbytes, storage.nbytes()));
        storage.set_data_ptr_noswap(std::move(memory));
        storage.set_nbytes(nbytes);
    }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return NPU; }
    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        this_device = device.index() < 0 ? this_device : device.index();
        return before;
    }
    c10::Device getDevice() const override { return {NPU, this_device}; }
    void setDevice(c10::Device device) const override { exchangeDevice(device); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { this_device = device.index(); }
    c10::Stream stream(c10::Device device, int64_t id) const {
        return c10::Stream(c10::Stream::UNSAFE, device, id);
    }
    c10::Stream getStream(c10::Device device) const override {
        return stream(device, this_stream[device.index()]);
    }
    c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
    c10::Stream getNewStream(c10::Device device, int) const override {
        check_thread("a stream");
        Held held;
        auto index = device.index() < 0 ? this_device : device.index();
        return stream({NPU, index}, next_stream++);
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }
    c10::Stream exchangeStream(c10::Stream next) const override {
        auto before = getStream(next.device());
        this_stream[next.device_index()] = next.id();
        return before;
    }
    c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
    void record(void** event, const c10::Stream& on, const c10::DeviceIndex, const c10::EventFlag)
        const override {
        check_thread("an event");
        *event = reinterpret_cast<void*>(::record(key_of(on.device_index(), on.id())));
    }
    void block(void* event, const c10::Stream& on) const override {
        if (event) make_wait(key_of(on.device_index(), on.id()), reinterpret_cast<int64_t>(event));
    }
    bool queryEvent(void* event) const override {
        return !event || has_happened(reinterpret_cast<int64_t>(event));
    }
    void synchronizeEvent(void* event) const override {
        if (event) wait_for_event(reinterpret_cast<int64_t>(event));
    }
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
    double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
    bool queryStream(const c10::Stream& on) const override {
        Held held;
        return queues[key_of(on.device_index(), on.id())].empty();
    }
    void synchronizeStream(const c10::Stream& on) const override {
        wait_for_stream(key_of(on.device_index(), on.id()));
    }
    void synchronizeDevice(const c10::DeviceIndex) const override {
        Held held;
        for (auto& [key, queue] : queues) run_up_to(key, -1);
    }
    void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Operations

bool on_npu(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == NPU; }

// A tensor of the same form over (a part of) a storage.
Tensor over(const c10::Storage& storage, const Tensor& form) {
    auto keys = c10::DispatchKeySet(
        storage.device_type() == NPU ? c10::DispatchKey::PrivateUse1 : c10::DispatchKey::CPU);
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, form.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes(), form.strides(), form.storage_offset());
    return made;
}

// The bytes of a device's tensor, as one of the host.
Tensor bytes_as_cpu(const Tensor& tensor) {
    auto storage = tensor.storage();
    c10::DataPtr memory(bytes_of(storage), new c10::Storage(storage),
        [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::kCPU);
    return over(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
        storage.nbytes(), std::move(memory), nullptr, false), tensor);
}

// A storage of the device with the bytes of one of the host.
c10::Storage copied(const c10::Storage& host) {
    auto memory = device_memory.allocate(host.nbytes());
    if (host.nbytes())
        std::memcpy(static_cast<DeviceBlock*>(memory.get_context())->bytes, host.data(), host.nbytes());
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), host.nbytes(),
        std::move(memory), &device_memory, true);
}

// Applies `f` to each tensor within a value; other values stay.
c10::IValue each_tensor(const c10::IValue& value, const std::function<Tensor(const Tensor&)>& f) {
    if (value.isTensor()) return value.toTensor().defined() ? f(value.toTensor()) : value;
    if (value.isTensorList()) {
        std::vector<Tensor> all;
        for (const Tensor& tensor : value.toTensorVector()) all.push_back(tensor.defined() ? f(tensor) : tensor);
        return all;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<Tensor>> all;
        for (std::optional<Tensor> tensor : value.toOptionalTensorList())
            all.push_back(tensor && tensor->defined() ? std::optional<Tensor>(f(*tensor)) : tensor);
        return all;
    }
    if (value.isDevice() && value.toDevice().type() == NPU) return c10::Device(c10::kCPU);
    return value;
}

std::vector<Tensor> tensors_in(const c10::IValue& value) {
    std::vector<Tensor> all;
    each_tensor(value, [&](const Tensor& tensor) { all.push_back(tensor); return tensor; });
    return all;
}

using Stack = torch::jit::Stack;

Stack call(const c10::OperatorHandle& op, const Stack& arguments, const std::function<Tensor(const Tensor&)>& f) {
    Stack stack;
    for (const auto& value : arguments) stack.push_back(each_tensor(value, f));
    op.callBoxed(stack);
    return stack;
}

Tensor as_cpu(const Tensor& tensor) { return on_npu(tensor) ? bytes_as_cpu(tensor) : tensor; }

void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
    const auto& schema = op.schema();
    auto count = schema.arguments().size();
    Stack arguments(stack->end() - count, stack->end());
    stack->resize(stack->size() - count);
    auto name = c10::toString(op.operator_name());
    // Numbers and tensors of the host are read when an operation is launched.
    for (auto& value : arguments)
        value = each_tensor(value, [](const Tensor& t) { return on_npu(t) ? t : t.clone(); });
    for (auto& value : arguments)
        if (value.isDevice()) value = c10::Device(c10::kCPU);
    bool may_index = name.find("index") != std::string::npos;
    for (auto& value : arguments)
        for (const auto& tensor : tensors_in(value)) {
            bool is_here = on_npu(tensor) && tensor.device().index() == this_device;
            bool is_host = !on_npu(tensor) && (tensor.dim() == 0 || may_index);
            TORCH_CHECK(is_here || is_host, name, ": a tensor of ", tensor.device(), " is used on npu:",
                int(this_device));
        }
    // What is written to is an argument, and is returned as it is.
    std::vector<c10::IValue> returned;
    for (const auto& result : schema.returns()) {
        for (size_t i = 0; result.alias_info() && i < count; ++i) {
            auto* info = schema.arguments()[i].alias_info();
            if (info && info->isWrite() && info->beforeSets() == result.alias_info()->beforeSets())
                returned.push_back(arguments[i]);
        }
    }
    bool is_in_place = returned.size() == schema.returns().size();
    if (is_in_place) {
        // An `out` of no elements is made large enough now.
        for (const auto& value : arguments) for (const auto& t : tensors_in(value)) if (on_npu(t) && t.numel() == 0) goto now;
        enqueue(name.c_str(), [op, arguments, name] {
            try {
                call(op, arguments, as_cpu);
            } catch (const std::exception& e) {
                TORCH_CHECK(false, "npu: ", name, ": ", e.what());
            }
        });
        for (auto& each : returned) stack->push_back(each);
        return;
    }
    try {
        Stack shapes = call(op, arguments, [](const Tensor& tensor) {
            return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::kMeta).pinned_memory(std::nullopt));
        });
        Stack results;
        for (const auto& value : shapes)
            results.push_back(each_tensor(value, [](const Tensor& shape) {
                return at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(c10::Device(NPU, this_device)));
            }));
        for (const auto& value : results) TORCH_CHECK(value.isTensor() || value.isTensorList(), "no tensor");
        enqueue(name.c_str(), [op, arguments, results] {
            Stack done = call(op, arguments, as_cpu);
            for (size_t i = 0; i < done.size(); ++i) {
                auto to = tensors_in(results[i]), from = tensors_in(done[i]);
                for (size_t j = 0; j < to.size(); ++j) as_cpu(to[j]).copy_(from[j]);
            }
        });
        stack->insert(stack->end(), results.begin(), results.end());
        return;
    } catch (const std::exception&) {
    }
now:
    // Its shape depends on values: they are waited for.
    check_thread(name.c_str());
    wait_for_stream(key_of(this_device, current_stream()));
    {
        Held held;
        counts[name + " (now)"]++;
    }
    std::vector<std::pair<Tensor, Tensor>> own;  // as the operation sees it, and as it is
    Stack done = call(op, arguments, [&](const Tensor& tensor) {
        bool is_new = on_npu(tensor) && tensor.storage().nbytes() == 0;  // the operation sizes it
        auto seen = is_new ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : as_cpu(tensor);
        own.emplace_back(seen, tensor);
        return seen;
    });
    for (auto& [seen, tensor] : own)
        if (on_npu(tensor) && seen.sizes() != tensor.sizes()) {
            auto* impl = tensor.unsafeGetTensorImpl();
            impl->set_storage_keep_dtype(copied(seen.storage()));
            impl->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
        }
    for (auto& value : done)
        stack->push_back(each_tensor(value, [&](const Tensor& result) {
            for (auto& [seen, tensor] : own)
                if (seen.is_same(result)) return tensor;
            for (auto& [seen, tensor] : own)  // a view of an argument
                if (on_npu(tensor) && result.nbytes() && seen.storage().is_alias_of(result.storage()))
                    return over(tensor.storage(), result);
            return over(copied(result.storage()), result);
        }));
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
    c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(NPU, this_device));
    return at::detail::empty_strided_generic(size, stride, &device_memory,
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
    c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(NPU, this_device));
    return at::detail::empty_generic(size, &device_memory,
        c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
    c10::DeviceGuard guard(on_npu(to) ? to.device() : from.device());
    if (!on_npu(to) && !(non_blocking && is_pinned(to.data_ptr()))) {
        check_thread("a copy to the host");
        wait_for_stream(key_of(this_device, current_stream()));
        c10::InferenceMode plain;
        as_cpu(to).copy_(as_cpu(from));
        return to;
    }
    bool is_taken = !on_npu(from) && !(non_blocking && is_pinned(from.data_ptr()));
    Tensor source = is_taken ? from.clone() : from;
    enqueue("copy", [source, to] { as_cpu(to).copy_(as_cpu(source)); });
    return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
    to.resize_(from.sizes());
    return copy_from(from, to, false);
}

at::Scalar number(const Tensor& tensor) {
    check_thread("a number for the host");
    wait_for_stream(key_of(this_device, current_stream()));
    return as_cpu(tensor).item();
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}

Tensor& set_source(Tensor& self, at::Storage storage) {
    int64_t size = storage.nbytes() / self.itemsize();
    return at::native::set_storage_cpu_(self, storage, 0, {size}, {1});
}

const Tensor& resize(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
    auto* impl = self.unsafeGetTensorImpl();
    int64_t count = c10::multiply_integers(size);
    size_t nbytes = (impl->storage_offset() + count) * self.itemsize();
    if (nbytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), nbytes);
    impl->set_sizes_contiguous(size);
    return self;
}

// A queued operation holds its tensors, so their memory is nobody else's before it has run.
void record_stream(Tensor&, c10::Stream) { check_thread("memory of another stream"); }

// torch asks devices of others for their own convolution, which has the arguments of its own.
void convolution(const c10::OperatorHandle&, Stack* stack) {
    run_on_cpu(c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", ""), stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("resize_", resize);
    m.impl("set_.source_Storage", set_source);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", number);
    m.impl("record_stream", record_stream);
    m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
}

}  // namespace

PYBIND11_MODULE(_npu_device, m) {
    at::RegisterPrivateUse1HooksInterface(new Hooks());
    using released = pybind11::call_guard<pybind11::gil_scoped_release>;
    m.def("device_count", &device_count);
    m.def("current_device", [] { return int(this_device); });
    m.def("has_entered", [] { return has_entered; });
    m.def("set_device", [](int64_t index) {
        TORCH_CHECK(0 <= index && index < device_count(), "npu:", index, " is not there");
        int64_t entered = -1;
        TORCH_CHECK(entered_device.compare_exchange_strong(entered, index) || entered == index,
            "this process is of npu:", entered, ", and a thread enters npu:", index);
        has_entered = true;
        this_device = index;
        aclrtSetDevice(index);
    });
    m.def("synchronize", [] { Guard().synchronizeDevice(this_device); }, released());
    m.def("memory_allocated", [] { return num_bytes.load(); });
    m.def("is_pinned", [](int64_t address) { return is_pinned(reinterpret_cast<void*>(address)); });
    m.def("counts", [] { Held held; return counts; });
}
