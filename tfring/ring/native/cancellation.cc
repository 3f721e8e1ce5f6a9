// Finds the cancellation manager of a kernel's step, which TensorFlow's C API shows to no kernel.
//
// TensorFlow cancels a step when one of its operations fails, and then waits for those that run. A kernel's
// context points to its parameters, of which the first is the step's id and one the manager; where, releases
// differ in. So an operation is run once under a manager made for it, and looks where the pointer to that
// stands. Memory is read through a pipe, which tells what cannot be read, and unless there is one such place,
// a kernel waits on.
#include "cancellation.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "core.h"
#include "invocation.h"

struct TFE_CancellationManager;
struct TFE_Context;
struct TFE_Op;
struct TFE_TensorHandle;

namespace tfring {
namespace {

constexpr size_t kContextWords = 8;     // of a kernel's context, which has more, looked at,
constexpr size_t kParameterWords = 48;  // and of what they point to

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

struct Place {
  size_t in_context = 0;
  size_t in_parameters = 0;
  bool is_known = false;
};
Place place;

bool look_up_eager_api() {
#define TFRING_LOOK_UP(result, name, arguments)                              \
  eager.name = reinterpret_cast<result(*) arguments>(find_tf_symbol(#name)); \
  if (eager.name == nullptr) return false;
  TFRING_EAGER_SYMBOLS(TFRING_LOOK_UP)
#undef TFRING_LOOK_UP
  return true;
}

// Copies words from an address that may be none; returns how many there are.
size_t read_words(uintptr_t address, uintptr_t* words, size_t count) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC | O_NONBLOCK) != 0) return 0;
  const ssize_t written = write(fds[1], reinterpret_cast<const void*>(address), count * sizeof(*words));
  const ssize_t got = written <= 0 ? 0 : read(fds[0], words, static_cast<size_t>(written));  // else EFAULT
  close(fds[0]);
  close(fds[1]);
  return got <= 0 ? 0 : static_cast<size_t>(got) / sizeof(*words);
}

int32_t is_cancelled(void* manager) {
  return eager.TFE_CancellationManagerIsCancelled(static_cast<TFE_CancellationManager*>(manager)) ? 1 : 0;
}

}  // namespace

Cancellable::Cancellable(TF_OpKernelContext* context) {
  if (!place.is_known) return;
  void** parameters = reinterpret_cast<void***>(context)[place.in_context];
  void* manager = parameters[place.in_parameters];
  if (manager != nullptr) tfring_set_cancellation(is_cancelled, manager);
}

Cancellable::~Cancellable() { tfring_set_cancellation(nullptr, nullptr); }

void find_cancellation(void* state, TF_OpKernelContext* context) {
  const auto wanted = static_cast<uintptr_t>(static_cast<Attributes*>(state)->handle);
  const auto* in_context = reinterpret_cast<const uintptr_t*>(context);
  const auto step = static_cast<uintptr_t>(eager.TF_StepId(context));
  for (size_t i = 0; i < kContextWords && !place.is_known; ++i) {
    uintptr_t words[kParameterWords];
    const size_t count =
        in_context[i] % sizeof(void*) == 0 ? read_words(in_context[i], words, kParameterWords) : 0;
    if (count == 0 || words[0] != step) continue;
    const auto* found = std::find(words, words + count, wanted);
    if (found != words + count) place = {i, static_cast<size_t>(found - words), true};
  }
}

}  // namespace tfring

// Learns how kernels find out that their step is cancelled, with the help of TensorFlow's eager context.
// Returns 1 if they will, 0 if not: then a kernel waits on.
extern "C" TFRING_API int tfring_find_cancellation(void* context) {
  using tfring::eager;
  tfring::ScopedStatus status;
  if (!tfring::look_up_eager_api()) return 0;
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
  return tfring::place.is_known ? 1 : 0;
}
