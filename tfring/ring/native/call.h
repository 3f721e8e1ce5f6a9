// The current call.
#pragma once

#include <cstdint>

#include "core.h"
#include "frame.h"
#include "group.h"

namespace tfring {

// Belongs to the thread that holds the call lock.
struct Call {
  Group* group = nullptr;
  CallHeader header{};
  int32_t caller = TFRING_ANY_THREAD;  // the caller that waits; determines how Ctrl-C is noticed
  bool is_of_all = false;              // all ranks of the world take part
  bool is_on_pool_thread = false;      // and it runs on a TensorFlow thread

  Kind kind() const { return static_cast<Kind>(header.kind); }
};

}  // namespace tfring
