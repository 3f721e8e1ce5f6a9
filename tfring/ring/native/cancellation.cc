// Finds the cancellation manager of a kernel's step, which TensorFlow's C API shows to no kernel.
//
// TensorFlow cancels a step when one of its operations fails, and then waits for those that run. A kernel's
// context points to its parameters; the first is the step's id, and another the manager. A table has their
// positions for the tested releases (offsetof in tensorflow/core/framework/op_kernel.h). They are verified:
// an operation runs once under a manager made for it, and compares. Memory is read through a pipe, which
// reports unreadable memory. With another release, or if the pointer is not there, a kernel continues to
// wait.
#include "cancellation.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "core.h"
#include "invocation.h"

struct TFE_CancellationManager;
struct TFE_Context;
struct TFE_Op;
struct TFE_TensorHandle;

namespace tfring {
namespace {

// clang-format off
#define TFRING_EAGER_SYMBOLS(X)                                                                     \
  X(TFE_CancellationManager*, TFE_NewCancellationManager, ())                                       \
  X(void, TFE_DeleteCancellationManager, (TFE_CancellationManager*))                                \
  X(bool, TFE_CancellationManagerIsCancelled, (TFE_CancellationManager*))                           \
  X(void, TFE_OpSetCancellationManager, (TFE_Op*, TFE_CancellationManager*, TF_Status*))            \
  X(TFE_Op*, TFE_NewOp, (TFE_Context*, const char* name, TF_Status*))                               \
  X(void, TFE_DeleteOp, (TFE_Op*))                                                                  \
  X(void, TFE_OpSetDevice, (TFE_Op*, const char* device, TF_Status*))                               \
  X(void, TFE_OpSetAttrInt, (TFE_Op*, const char* name, int64_t value))                             \
  X(void, TFE_OpSetAttrString, (TFE_Op*, const char* name, const void* value, size_t length))       \
  X(int64_t, TF_StepId, (TF_OpKernelContext*))                                                      \
  X(void, TFE_Execute, (TFE_Op*, TFE_TensorHandle** results, int* num_results, TF_Status*))
// clang-format on

struct EagerApi {
#define TFRING_DECLARE(result, name, arguments) result(*name) arguments;
  TFRING_EAGER_SYMBOLS(TFRING_DECLARE)
#undef TFRING_DECLARE
};
EagerApi eager{};

struct FieldOffsets {
  const char* release;
  size_t in_context;     // of the pointer to the parameters, in words
  size_t in_parameters;  // of the pointer to the manager, in words
};
constexpr FieldOffsets kOffsets[] = {{"2.18.", 2, 21}, {"2.19.", 2, 21}, {"2.20.", 3, 21}, {"2.21.", 3, 21}};
constexpr size_t kParameterWords = 22;

FieldOffsets offsets{};
bool is_known = false;  // and verified

bool look_up_eager_api() {
#define TFRING_LOOK_UP(result, name, arguments)                              \
  eager.name = reinterpret_cast<result(*) arguments>(find_tf_symbol(#name)); \
  if (eager.name == nullptr) return false;
  TFRING_EAGER_SYMBOLS(TFRING_LOOK_UP)
#undef TFRING_LOOK_UP
  return true;
}

// Copies words from an address that may be invalid. Returns the number of readable words.
size_t read_words(uintptr_t address, uintptr_t* words, size_t count) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) return 0;
  const ssize_t written = write(fds[1], reinterpret_cast<const void*>(address), count * sizeof(*words));
  const ssize_t got = written <= 0 ? 0 : read(fds[0], words, static_cast<size_t>(written));  // or EFAULT
  close(fds[0]);
  close(fds[1]);
  return got <= 0 ? 0 : static_cast<size_t>(got) / sizeof(*words);
}

int32_t is_cancelled(void* manager) {
  return eager.TFE_CancellationManagerIsCancelled(static_cast<TFE_CancellationManager*>(manager)) ? 1 : 0;
}

}  // namespace

Cancellable::Cancellable(TF_OpKernelContext* context) {
  if (!is_known) return;
  void** parameters = reinterpret_cast<void***>(context)[offsets.in_context];
  void* manager = parameters[offsets.in_parameters];
  if (manager != nullptr) tfring_set_cancellation(is_cancelled, manager);
}

Cancellable::~Cancellable() { tfring_set_cancellation(nullptr, nullptr); }

void find_cancellation(void* state, TF_OpKernelContext* context) {
  const auto wanted = static_cast<uintptr_t>(static_cast<Attributes*>(state)->handle);
  const auto* in_context = reinterpret_cast<const uintptr_t*>(context);
  const auto step = static_cast<uintptr_t>(eager.TF_StepId(context));
  uintptr_t words[kParameterWords];
  const size_t count = read_words(in_context[offsets.in_context], words, kParameterWords);
  is_known = count == kParameterWords && words[0] == step && words[offsets.in_parameters] == wanted;
}

}  // namespace tfring

// Learns how kernels detect that their step is cancelled, by TensorFlow's eager context and version. Returns
// 1 if they can detect it, 0 if not: then a kernel continues to wait.
extern "C" TFRING_API int tfring_find_cancellation(void* context, const char* version) {
  using tfring::eager;
  tfring::is_known = false;
  const auto* found = std::find_if(
      std::begin(tfring::kOffsets), std::end(tfring::kOffsets),
      [&](const auto& each) { return std::strncmp(each.release, version, std::strlen(each.release)) == 0; });
  if (found == std::end(tfring::kOffsets) || !tfring::look_up_eager_api()) return 0;
  tfring::offsets = *found;
  tfring::ScopedStatus status;
  TFE_CancellationManager* manager = eager.TFE_NewCancellationManager();
  TFE_Op* op = eager.TFE_NewOp(static_cast<TFE_Context*>(context), "TfringFindCancellation", status.get());
  if (status.ok()) eager.TFE_OpSetDevice(op, "/CPU:0", status.get());
  if (status.ok()) {
    int num_results = 0;
    eager.TFE_OpSetAttrInt(op, "handle", static_cast<int64_t>(reinterpret_cast<uintptr_t>(manager)));
    eager.TFE_OpSetAttrString(op, "key", "", 0);
    eager.TFE_OpSetCancellationManager(op, manager, status.get());
    if (status.ok()) eager.TFE_Execute(op, nullptr, &num_results, status.get());
  }
  if (op != nullptr) eager.TFE_DeleteOp(op);
  eager.TFE_DeleteCancellationManager(manager);
  return tfring::is_known ? 1 : 0;
}
