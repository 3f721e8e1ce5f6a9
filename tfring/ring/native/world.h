// A rank among the ranks it works with: links to its peers, groups of them, and the collectives it runs.
//
//     rank ◄──data──► peer                   one link for each pair that exchanges anything; control frames
//                                            apart from it
//
//   World (world.cc)                         begin and end of calls, of which one at a time has the CallLock
//                                            (call_lock.cc); puts together the others
//
//   of the thread that holds the call lock:
//     RowReduction (reduce_rows.cc)          the sum of rows under ids, made of exchanges; RowSums (rows.cc)
//     Exchange (exchange.cc)                 collectives whose sizes are learned on the way; sends, receives
//     Collectives (collectives.cc)           those whose sizes are known
//       │ Plan (plan.cc)
//       ▼
//     Execution (execute.cc)                 moves bytes of the plan over Links (links.cc) while any move;
//       │                                    channels are shm_channel.cc, tcp_channel.cc (over tls.cc)
//       ▼
//     Waiting (wait.cc)                      while none move: looks again, sleeps,
//     StallInspector (stall_inspector.cc)    and asks why: a rank is slow, or some wait for each other
//       │
//       ▼
//   shared with the watcher's thread (watcher.cc), and with threads that close or abort the world, behind a
//   lock:
//     Guarded<Liveness> (liveness.cc)        control connections (peer.cc): who left, died, stopped, is cut
//                                            off, and why the world broke
//     Calls (calls.cc)                       what each pair of ranks has begun together
//
//   Settings never change; Group (group.cc): some of the ranks; Call: the one under way, which WakeEvent
//   wakes; Record (trace.cc): of a call, if a trace is written; Fd (fd.cc): closes in a forked child
//
// A plan knows peers and memory, the execution knows plans and links; neither knows collectives. Nothing is
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

  // Runs the call of call.kind.
  Status run(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
             const int64_t* counts, tfring_allocate allocate, void* context);

  tfring_statistics statistics();
  // The first failure, after which nothing works; ok if there was none.
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
  RingState state_;  // for the process's other worlds to read
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
