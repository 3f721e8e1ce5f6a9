// A rank among the ranks of a ring: links to its peers, groups of them, and the collectives it runs.
//
//     rank ◄──data──► peer                   one link for each pair that exchanges data; control frames use
//                                            separate connections
//
//   World (world.cc)                         begin and end of calls, one of which at a time has the CallLock
//                                            (call_lock.cc); combines the others
//
//   for the thread that holds the call lock:
//     RowReduction (reduce_rows.cc)          the sum of rows by ids, made of exchanges; RowSums (rows.cc)
//     Exchange (exchange.cc)                 collectives with sizes learned on the way; sends, receives
//     Collectives (collectives.cc)           collectives with known sizes
//       │ Plan (plan.cc)
//       ▼
//     Execution (execute.cc)                 moves bytes of the plan over Links (links.cc); the
//       │                                    channels are shm_channel.cc, tcp_channel.cc (over tls.cc)
//       ▼
//     Waiting (wait.cc)                      while no bytes can move: polls, sleeps,
//     StallInspector (stall_inspector.cc)    and asks why: a rank is slow, or some wait for each other
//       │
//       ▼
//   shared with the watcher's thread (watcher.cc), and with threads that close or abort the world, under a
//   lock:
//     Guarded<Liveness> (liveness.cc)        control connections (peer.cc): ranks that left, died, stopped or
//                                            are cut off, and why the world broke
//     Calls (calls.cc)                       the calls that each pair of ranks has begun together
//
//   Settings never change; Group (group.cc): some of the ranks; Call: the current one, which WakeEvent wakes;
//   Record (trace.cc): record of a call, if a trace is written; Fd (fd.cc): closes in a forked child
//
// A plan knows peers and memory, the execution knows plans and links; neither knows collectives. No memory is
// allocated while bytes move: plans keep their memory from one collective to the next, and scratch grows
// before the first byte is sent.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "call_lock.h"
#include "collectives.h"
#include "core.h"
#include "exchange.h"
#include "execute.h"
#include "frame.h"
#include "group.h"
#include "guarded.h"
#include "liveness.h"
#include "process.h"
#include "reduce_rows.h"
#include "settings.h"
#include "status.h"
#include "wake_event.h"
#include "watcher.h"

namespace tfring {

class World final : private Watched {
 public:
  // Takes over the descriptors. Returns once all ranks have opened the world.
  static Status open(const tfring_options& options, std::shared_ptr<World>* world,
                     std::shared_ptr<Group>* all);
  ~World() override;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::shared_ptr<Group> make_group(const Group& parent, const int32_t* members, int num_members,
                                    const char* name) const;
  // Adds a link to an open world, and takes over its descriptors.
  Status adopt_link(const tfring_link& link);

  // Runs the call of kind call.kind.
  Status run(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
             const int64_t* counts, tfring_allocate allocate, void* context);

  tfring_statistics statistics();
  // Returns the first failure, after which all calls fail; ok if there was none.
  Status failure();
  void abort(const Status& why);
  void tell_raised(const std::string& error);
  uint64_t identity() const { return settings_.identity; }
  void close();

 private:
  explicit World(const tfring_options& options);

  Status connect(const tfring_options& options, Group* all);
  Status add_link(const tfring_link& link, bool is_open);
  void hear(int rank, int64_t now) override;
  int watch(int64_t now, int64_t late, const Poll& poll) override;

  Status begin(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run_begun(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                   const int64_t* counts, tfring_allocate allocate, void* context);
  void end(const Status& status);

  const Settings settings_;
  RingState state_;  // read by the process's other worlds
  WakeEvent wake_event_;
  Guarded<Liveness> liveness_;

  CallLock call_lock_;
  // These belong to the thread that holds the call lock.
  Execution execution_;
  Collectives collectives_;
  Exchange exchange_;
  RowReduction row_reduction_;
};

}  // namespace tfring
