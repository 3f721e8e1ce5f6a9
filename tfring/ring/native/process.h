// State of a process that all its rings share: Python's signals, warnings, TensorFlow's threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "frame.h"

namespace tfring {

// Runs Python's signal handlers and returns true if one raised. For Python's main thread. Returns false
// before tfring_use_python.
bool python_interrupted();

// Does the same for TensorFlow ops, which run while Python's main thread waits inside TensorFlow and runs no
// handler. Counts Ctrl-C from the first call. Returns true once Python has not learned of one and should
// raise KeyboardInterrupt.
bool op_interrupted();

// Returns whether the step of an op on this thread is cancelled, as far as this is known.
bool op_cancelled();

// Returns whether this is a TensorFlow thread, not a Python thread that runs an eager op.
bool on_pool_thread();

// The state of a ring that the other rings of its process read.
struct RingState {
  std::string name;
  std::atomic<uint64_t> begun{0};  // collectives of all ranks
};
// The rings of this process, by identity, which two rings may share. The state must live as long.
void join_ring(uint64_t ring, const RingState* state);
void leave_ring(const RingState* state);
std::string name_of_ring(uint64_t ring);
// Count collectives of all ranks that stand still, by ring and by whether they use a thread of TensorFlow's
// inter-op pool.
void stands_still(uint64_t ring, bool on_pool_thread);
void moves_again(uint64_t ring, bool on_pool_thread);
// Reports all of them, none if they are more than kMostWaiting; if the pool has no more threads, so that no
// other can begin, only those on its threads.
void notify_waiting(Pong* pong);
// Returns whether a peer with all threads waiting waits for collectives that this process has not begun, and
// can begin only after its own, all of which wait for the peer in turn.
bool wait_for_each_other(const Pong& peer);
// Returns the ring in which a peer waits for a collective that this process has not begun; 0 for none.
uint64_t waits_elsewhere(const Pong& peer);

// One line for the user. A Python thread takes it from next_warning, which waits for it, and logs it, with
// the stack of the program if `with_stack` is true.
struct Warning {
  std::string line;
  bool with_stack;
};
void warn(const std::string& line, bool with_stack = false);
Warning next_warning();

// Breaks a ring of this process because of a failure outside it; see core.cc.
void break_ring(uint64_t ring, const Status& why);

void forget_process_in_child();

}  // namespace tfring
