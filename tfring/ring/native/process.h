// State of a process, shared by all its rings: Python's signals, warnings, TensorFlow's threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "frame.h"

namespace tfring {

// Lets Python's signal handlers run; true if one raised. For Python's main thread. False before
// tfring_use_python.
bool python_interrupted();

// The same for ops of TensorFlow, which run while Python's main thread waits inside TensorFlow and runs no
// handler: from the first call on Ctrl-C is counted; true once Python has not heard of one and is to raise
// KeyboardInterrupt.
bool op_interrupted();

// Returns whether the step that an op on this thread belongs to is cancelled, as far as can be known.
bool op_cancelled();

// Returns whether this is a thread of TensorFlow's and not one of Python's, which an eager op runs on.
bool on_pool_thread();

// The state of a ring that the other rings of its process read.
struct RingState {
  std::string name;
  std::atomic<uint64_t> begun{0};  // collectives of all ranks
};
// The rings this process is in, by identity, which two may share. The state lives as long.
void join_ring(uint64_t ring, const RingState* state);
void leave_ring(const RingState* state);
std::string name_of_ring(uint64_t ring);
// Collectives of all ranks that stand still, by their ring; some on threads of TensorFlow's inter-op pool.
void stands_still(uint64_t ring, bool on_pool_thread);
void moves_again(uint64_t ring, bool on_pool_thread);
// Tells of all of them; where the pool has no more threads, so that no other can begin, of those on its
// threads.
void notify_waiting(Pong* pong);
// Returns whether a peer whose threads all wait waits for collectives that this process has not begun, and
// could begin only after its own have gone on, all of which wait for the peer in turn.
bool wait_for_each_other(const Pong& peer);
// The ring in which a peer waits for a collective that this process has not begun; 0 for none.
uint64_t waits_elsewhere(const Pong& peer);

// One line for the user; a thread of Python's takes it from next_warning, which waits for it, and logs it,
// with the stack of the program where `with_stack` is true.
struct Warning {
  std::string line;
  bool with_stack;
};
void warn(const std::string& line, bool with_stack = false);
Warning next_warning();

// Breaks a ring of this process' because of a failure outside it; see core.cc.
void break_ring(uint64_t ring, const Status& why);

void forget_process_in_child();

}  // namespace tfring
