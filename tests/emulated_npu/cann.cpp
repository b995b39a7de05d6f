// The part of CANN that Mooncake's wheel for NPUs calls: its runtime (`acl...`) and the engine of its
// transfers (`adxl::AdxlEngine`), between processes of one machine.
//
// As strict as CANN says it is: a thread without a context gets an error. Memory of the host is known
// if the runtime has allocated it, and an engine registers nothing else. Of its own memory it reads
// and writes registered memory alone; a peer's is not checked. An engine listens under its name on an
// abstract socket, so a peer finds the process by the socket's credentials, and the kernel copies
// between both. The engine also listens at its name's port: Mooncake takes a port that is free.

#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

constexpr int OK = 0, INVALID = 100000, NO_CONTEXT = 107002, NOT_SUPPORTED = 207000;
constexpr size_t PAGE = 64 << 10;  // of host memory that an engine registers

struct Ranges {
    std::map<char*, size_t> all;

    bool cover(const void* address, size_t nbytes) const {
        auto at = static_cast<const char*>(address);
        auto found = all.upper_bound(const_cast<char*>(at));
        if (found == all.begin()) return false;
        --found;
        return at + nbytes <= found->first + found->second;
    }
};

std::mutex mutex;  // of all below
Ranges of_host;
thread_local int32_t device = -1;

bool has_context() { return device >= 0; }

}  // namespace

extern "C" {

struct Attributes {
    uint32_t device, type, page_size, reserved[4];
};
enum { HOST = 0, UNREGISTERED = 2 };

const char* aclGetRecentErrMsg() { return "no context, or memory that is not known"; }
const char* aclrtGetSocName() { return "Ascend910B3"; }

int aclrtSetDevice(int32_t index) { device = index; return OK; }
int aclrtGetDevice(int32_t* index) { *index = device; return has_context() ? OK : NO_CONTEXT; }
int aclrtGetDeviceCount(uint32_t* count) { *count = 8; return OK; }
int aclrtGetPhyDevIdByLogicDevId(int32_t logic, int32_t* found) { *found = logic; return OK; }
int aclrtGetLogicDevIdByUserDevId(int32_t user, int32_t* found) { *found = user; return OK; }

// A context is its device's number and one.
int aclrtGetCurrentContext(void** context) {
    *context = reinterpret_cast<void*>(intptr_t{device} + 1);
    return has_context() ? OK : NO_CONTEXT;
}
int aclrtSetCurrentContext(void* context) {
    device = reinterpret_cast<intptr_t>(context) - 1;
    return has_context() ? OK : INVALID;
}

int aclrtMallocHost(void** memory, size_t nbytes) {
    if (!has_context()) return NO_CONTEXT;
    if (posix_memalign(memory, PAGE, nbytes)) return INVALID;
    std::lock_guard held(mutex);
    of_host.all[static_cast<char*>(*memory)] = nbytes;
    return OK;
}
int aclrtFreeHost(void* memory) {
    std::lock_guard held(mutex);
    if (!of_host.all.erase(static_cast<char*>(memory))) return INVALID;
    std::free(memory);
    return OK;
}
bool npu_knows_host(const void* address) {  // not CANN's: for device.cpp
    std::lock_guard held(mutex);
    return of_host.cover(address, 1);
}
int aclrtPointerGetAttributes(const void* address, Attributes* found) {
    *found = {0, uint32_t(npu_knows_host(address) ? HOST : UNREGISTERED)};
    return OK;
}

int aclrtCreateStreamWithConfig(void** stream, uint32_t, uint32_t) {
    *stream = nullptr;
    return has_context() ? OK : NO_CONTEXT;
}
int aclrtDestroyStream(void*) { return OK; }
int aclrtStreamAbort(void*) { return OK; }
int aclrtSynchronizeStreamWithTimeout(void*, int32_t) { return OK; }
int aclrtMemcpy(void* to, size_t, const void* from, size_t nbytes, int) {
    std::memmove(to, from, nbytes);
    return has_context() ? OK : NO_CONTEXT;
}

// Of A3's fabric memory, of memory that processes share and of copies with a card: not emulated.
#define NOT_EMULATED(name) int name() { return NOT_SUPPORTED; }
NOT_EMULATED(aclrtFreePhysical)
NOT_EMULATED(aclrtHostRegister)
NOT_EMULATED(aclrtHostUnregister)
NOT_EMULATED(aclrtIpcMemClose)
NOT_EMULATED(aclrtIpcMemGetExportKey)
NOT_EMULATED(aclrtIpcMemImportByKey)
NOT_EMULATED(aclrtMallocPhysical)
NOT_EMULATED(aclrtMapMem)
NOT_EMULATED(aclrtMemExportToShareableHandleV2)
NOT_EMULATED(aclrtMemGetAllocationGranularity)
NOT_EMULATED(aclrtMemImportFromShareableHandleV2)
NOT_EMULATED(aclrtMemSetAccess)
NOT_EMULATED(aclrtMemcpyAsync)
NOT_EMULATED(aclrtMemcpyBatch)
NOT_EMULATED(aclrtReleaseMemAddress)
NOT_EMULATED(aclrtReserveMemAddress)
NOT_EMULATED(aclrtReserveMemAddressNoUCMemory)
NOT_EMULATED(aclrtUnmapMem)

}  // extern "C"

namespace ge {

class AscendString {
   public:
    AscendString(const char* text);
    bool operator<(const AscendString& other) const;
    const std::string& text() const { return *text_; }

   private:
    std::shared_ptr<std::string> text_;
};

AscendString::AscendString(const char* text) : text_(std::make_shared<std::string>(text)) {}
bool AscendString::operator<(const AscendString& other) const { return *text_ < *other.text_; }

}  // namespace ge

namespace adxl {

using Status = uint32_t;
using ge::AscendString;
constexpr Status SUCCESS = 0, PARAM_INVALID = 103900, NOT_CONNECTED = 103902, FAILED = 503900;
enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
struct MemDesc {
    uintptr_t address;
    size_t nbytes;
};
struct TransferOpDesc {
    uintptr_t own, remote;
    size_t nbytes;
};

class AdxlEngine {
   public:
    AdxlEngine();
    ~AdxlEngine();
    Status Initialize(const AscendString& name, const std::map<AscendString, AscendString>&);
    void Finalize();
    Status RegisterMem(const MemDesc& memory, MemType type, void*& handle);
    Status DeregisterMem(void* handle);
    Status Connect(const AscendString& name, int32_t timeout_ms);
    Status Disconnect(const AscendString& name, int32_t timeout_ms);
    Status TransferSync(const AscendString& name, TransferOp operation,
        const std::vector<TransferOpDesc>& parts, int32_t timeout_ms);

   private:
    struct State {
        int listening = -1, at_port = -1;
        std::map<std::string, pid_t> peers;
        Ranges registered;
    };
    std::unique_ptr<State> state;
};

namespace {

struct Address {
    sockaddr_un name{AF_UNIX};
    socklen_t size;

    explicit Address(const std::string& engine) {
        auto text = "emulated-npu-" + engine;
        std::memcpy(name.sun_path + 1, text.data(), text.size());
        size = offsetof(sockaddr_un, sun_path) + 1 + text.size();
    }
    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&name); }
};

// Return a socket that listens at the port of `host:port`; -1 if the port is taken.
int listening_at_port_of(const std::string& engine) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(std::atoi(engine.c_str() + engine.rfind(':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (!bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) && !listen(fd, 1)) return fd;
    close(fd);
    return -1;
}

}  // namespace

AdxlEngine::AdxlEngine() : state(new State) {}
AdxlEngine::~AdxlEngine() { Finalize(); }

Status AdxlEngine::Initialize(const AscendString& name, const std::map<AscendString, AscendString>&) {
    if (!has_context()) return FAILED;
    Address own(name.text());
    state->listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(state->listening, own.get(), own.size) || listen(state->listening, 4096)) return FAILED;
    state->at_port = listening_at_port_of(name.text());
    if (state->at_port < 0) return FAILED;
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    return SUCCESS;
}

void AdxlEngine::Finalize() {
    for (int* fd : {&state->listening, &state->at_port}) {
        if (*fd >= 0) close(*fd);
        *fd = -1;
    }
}

Status AdxlEngine::RegisterMem(const MemDesc& memory, MemType type, void*& handle) {
    std::lock_guard held(mutex);
    auto at = reinterpret_cast<char*>(memory.address);
    if (!has_context() || type != MEM_HOST) return FAILED;
    if (memory.address % PAGE || !of_host.cover(at, memory.nbytes)) return PARAM_INVALID;
    state->registered.all[at] = memory.nbytes;
    handle = at;
    return SUCCESS;
}

Status AdxlEngine::DeregisterMem(void* handle) {
    std::lock_guard held(mutex);
    return state->registered.all.erase(static_cast<char*>(handle)) ? SUCCESS : PARAM_INVALID;
}

// The kernel gives a client the process that listens, before anybody accepts.
Status AdxlEngine::Connect(const AscendString& name, int32_t) {
    if (!has_context()) return FAILED;
    Address peer(name.text());
    ucred of_peer{};
    socklen_t size = sizeof of_peer;
    int client = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool is_there = !connect(client, peer.get(), peer.size) &&
        !getsockopt(client, SOL_SOCKET, SO_PEERCRED, &of_peer, &size);
    close(client);
    if (!is_there) return FAILED;
    std::lock_guard held(mutex);
    state->peers[name.text()] = of_peer.pid;
    return SUCCESS;
}

Status AdxlEngine::Disconnect(const AscendString& name, int32_t) {
    std::lock_guard held(mutex);
    return state->peers.erase(name.text()) ? SUCCESS : NOT_CONNECTED;
}

Status AdxlEngine::TransferSync(const AscendString& name, TransferOp operation,
    const std::vector<TransferOpDesc>& parts, int32_t) {
    if (!has_context()) return FAILED;
    pid_t peer;
    for (;;) {
        std::unique_lock held(mutex);
        auto found = state->peers.find(name.text());
        if (found == state->peers.end()) {  // the wheel may ask for connections as they are needed
            held.unlock();
            if (auto status = Connect(name, 0)) return status;
            continue;
        }
        peer = found->second;
        for (auto& part : parts)
            if (!state->registered.cover(reinterpret_cast<void*>(part.own), part.nbytes)) return PARAM_INVALID;
        break;
    }
    for (auto& part : parts) {
        iovec own{reinterpret_cast<void*>(part.own), part.nbytes};
        iovec remote{reinterpret_cast<void*>(part.remote), part.nbytes};
        auto move = operation == READ ? process_vm_readv : process_vm_writev;
        if (move(peer, &own, 1, &remote, 1, 0) != ssize_t(part.nbytes)) return FAILED;
    }
    return SUCCESS;
}

}  // namespace adxl
