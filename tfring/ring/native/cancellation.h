// Cancellation of the step that a kernel runs in, after another of its operations has failed.
#pragma once

#include "tf_api.h"

namespace tfring {

// Ends a kernel's wait in the ring with its step, for the calls of this thread during this object's lifetime.
class Cancellable {
 public:
  explicit Cancellable(TF_OpKernelContext* context);
  ~Cancellable();
  Cancellable(const Cancellable&) = delete;
  Cancellable& operator=(const Cancellable&) = delete;
};

// The kernel that finds out where TensorFlow keeps the cancellation; see tfring_find_cancellation.
void find_cancellation(void* state, TF_OpKernelContext* context);

}  // namespace tfring
