// A rank among the ranks it works with: links to its peers, groups of them, and the collectives it runs.
//
//     rank ◄──data──► peer        one link for each pair that exchanges anything; control frames apart from
//     it
//
//   world.cc        opening, links, groups, the turn
//   collectives.cc  the plan of each collective
//   exchange.cc     those whose sizes are learned on the way
//   reduce_rows.cc  the sum of rows under ids, made of these
//   execute.cc      the execution of a plan: move bytes while any move
//   wait.cc         waiting while none move: sleep, and ask why
//   disagreement.cc ranks that wait for each other
//   trace.cc        records of calls, if a trace is written
//   liveness.cc     peers that leave, die, stop or are cut off; on the watcher's thread, in a collective or
//   not
//
// A plan knows peers and memory, the execution knows plans and links; neither knows collectives. Nothing is
// allocated while bytes move: plans keep their memory from one collective to the next, and scratch grows
// before the first byte is sent.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "channel.h"
#include "core.h"
#include "fd.h"
#include "frame.h"
#include "plan.h"
#include "process.h"
#include "rows.h"
#include "status.h"
#include "watcher.h"

namespace tfring {

// Connections between this rank and one other. The control side is guarded by World::control_mutex_; the data
// side belongs to the collective under way.
struct Link {
  int rank = -1;
  std::string host;

  Fd control_fd;
  bool left = false;           // it said goodbye,
  uint64_t left_finished = 0;  // having finished this many calls with this rank
  bool closed = false;         // nothing more comes
  size_t fill = 0;             // bytes of `frame` read so far
  ControlFrame frame{};
  int64_t heard = 0;  // nanoseconds: its last sign of life; 0: none yet, and the world is not open
  int64_t asked = 0;  // the last ping
  int unanswered = 0;
  int64_t answered = 0;  // the last pong, which told
  uint64_t begun = 0;    // how many calls with this rank it has begun
  Pong pong{};
  uint64_t fails_from = UINT64_MAX;  // it gave up in this one of the calls with this rank,
  Status failure;                    // for this reason

  Fd data_fd;
  std::unique_ptr<Mailbox> own;    // the peer writes, this rank reads
  std::unique_ptr<Mailbox> peers;  // and the other way round
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
  CallHeader their_header{};
};

// Bytes that a sum of rows moved the last time, of all members together; see choose_row_sums.
struct Observed {
  uint64_t key = 0;
  int64_t sent = 0;
  int64_t summed = 0;
};

// A collective that was begun.
struct Past {
  CallHeader header{};
  std::vector<uint64_t> numbers;  // [rank]: its number among the collectives with that rank; 0 without it
};

// Some of a world's ranks; they share its links, its threads, its failures and its order of calls.
struct Group {
  std::string name;
  bool is_world = false;  // of all ranks, made with the world
  uint64_t identity = 0;
  std::vector<int> ranks;  // [member]
  int member = 0;          // this rank
  std::vector<int> order;  // [position]: rank; ordered by host, so that few edges of a ring cross the network
  std::vector<int> member_at;  // [position]
  int position = 0;
  int local_size = 1;               // members on each host; 1 where hosts differ in it
  uint64_t sequence = 0;            // of the collective begun last
  std::array<Observed, 64> seen{};  // by key; the later of two with one place

  int size() const { return static_cast<int>(ranks.size()); }
  int position_of(int of_member) const;
};

class World final : private Watched {
 public:
  // Takes over the descriptors. Returns once all ranks have opened the world.
  static Status open(const tfring_options& options, std::shared_ptr<World>* world,
                     std::shared_ptr<Group>* all);
  ~World() override;
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  Status make_group(const Group& parent, const int32_t* members, int num_members, const char* name,
                    std::shared_ptr<Group>* group) const;
  // Adds a link to an open world, and takes over its descriptors.
  Status adopt_link(const tfring_link& link);

  Status all_reduce(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status reduce(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status reduce_scatter(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status broadcast(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status barrier(Group* group, const tfring_call& call);
  Status exchange(Group* group, Kind kind, const tfring_call& call, const tfring_tensor* tensors,
                  int num_tensors, const int64_t* counts, tfring_place place, void* context);
  Status all_reduce_rows(Group* group, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                         tfring_place place, void* context);
  Status send(Group* group, const tfring_call& call, const tfring_tensor& tensor);
  Status receive(Group* group, const tfring_call& call, const tfring_tensor& like, tfring_shape place,
                 void* context);

  tfring_statistics statistics();
  // The first failure, after which nothing works; ok if there was none.
  Status failure();
  void abort(const Status& why);
  uint64_t identity() const { return identity_; }
  void close();

 private:
  explicit World(const tfring_options& options);

  // world.cc
  Status connect(const tfring_options& options, Group* all);
  Status add_link(const tfring_link& link);
  void place(Group* group) const;
  Status check(const Group& group, Kind kind, const tfring_call& call, const tfring_tensor* tensors,
               int num_tensors) const;
  Status begin(Group* group, Kind kind, const tfring_call& call, const tfring_tensor* tensors,
               int num_tensors);
  template <typename Body>
  Status run(Group* group, Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
             Body body) {
    TFRING_TRY(enter(call, kind == Kind::kBarrier ? nullptr : group));
    Status status = begin(group, kind, call, tensors, num_tensors);
    if (status.ok()) {
      try {
        status = body();
      } catch (const std::bad_alloc&) {
        status = no_memory();
      }
      end(status);
    }
    leave();
    return status;
  }
  void end(const Status& status);
  Status enter(const tfring_call& call, const Group* group);
  void leave();
  void release();
  Status need_scratch(int64_t size);
  Link* link_to(int rank) const { return links_[static_cast<size_t>(rank)].get(); }

  // collectives.cc
  Status gather_slots(int64_t slot);
  void add_slots_up(int64_t slot);
  Status small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status large_all_reduce(Algorithm algorithm, const tfring_call& call, const tfring_tensor* tensors,
                          int num_tensors);
  Status compressed_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run_reduce_scatter(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run_broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);

  // exchange.cc
  struct Rows;
  Status run_exchange(Rows* rows, tfring_place place, void* context);
  Status announce_rows(Rows* rows);
  Status check_rows(const Rows& rows) const;
  void take_rows(const Rows& rows, void* const* outputs);
  Status ask_for_place(const int64_t* numbers, tfring_place place, void* context, void** outputs);
  Status exchange_bytes(Kind kind, const char* bytes, const std::vector<int64_t>& sizes, Memory* to,
                        std::vector<int64_t>* theirs);

  // reduce_rows.cc
  Algorithm choose_way(const Group& group, const tfring_call& call, const CallHeader& header) const;
  Status reduce_by_gathering(tfring_place place, void* context);
  Status reduce_by_owner(tfring_place place, void* context);
  Status write_rows(tfring_place place, void* context);
  Status place_rows(const std::vector<int64_t>& counts, tfring_place place, void* context,
                    std::vector<void*>* outputs);
  void observe(int64_t sent, int64_t summed);
  Status no_memory();
  Status no_rows(size_t member);

  // execute.cc
  enum Until { kGreeted, kReceived, kDone };
  Status execute(Until until);
  bool done(Until until) const;
  int64_t sendable(const Queue& queue) const;
  bool may_receive(const Queue& queue) const;
  int64_t receivable(const Transfer& recv) const;
  int64_t least_receivable(const Queue& queue) const;
  Status send_some(Queue* queue, bool* moved);
  Status receive_some(Queue* queue, bool* moved);
  Status receive_header(Queue* queue, bool* moved);
  Status receive_bytes(const Transfer& transfer, Link* link, int64_t* got);
  void learn(int64_t start);

  // wait.cc
  Status wait();
  void sleep(int milliseconds);
  void sleep_for_news();
  void silence_news();
  Status look_up(int64_t now);
  Status interruption();
  Status check_step();
  Status check_news();
  Status check_left();
  Status adopt_peer_failure();
  void stand_still(bool stands);
  Status ask_why(int64_t now, double idle_seconds);
  Status ask_peers(int64_t now, double idle_seconds);
  bool is_pending(int rank) const;
  Link* needed(bool* for_data) const;
  bool reports_stall(int slow) const;
  Status peer_gone(Link* link);
  Status fail(Code code, const std::string& message);

  // disagreement.cc: all with control_mutex_ held but the first and the last
  Status report_disagreement(Link* link);
  bool has_begun(const Link& peer) const;
  const CallHeader* contradiction(const Link& peer) const;
  bool is_in_another(const Link& peer) const;
  uint64_t num_collectives(int rank) const;
  void remember();
  uint64_t asked_number(int rank) const;
  Status follow(const Link& peer);
  Status wait_crosswise(const Link& peer, int64_t now);
  std::string disagreement(int rank, const CallHeader& theirs) const;

  // trace.cc
  void start_record(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  void met(int rank);
  void finish_record(const Status& status);
  int64_t* adding() { return traced_ ? &record_.added : nullptr; }

  // liveness.cc: all but the first two and here() with control_mutex_ held
  void start_asking();
  int watch(int64_t now, int64_t late, std::vector<pollfd>* fds) override;
  void announce();
  void read_control(Link* link, int64_t now);
  void take_control(Link* link);
  void send_control(const Link& link, const ControlFrame& frame);
  void ask(Link* link, int64_t now, double period);
  void answer(Link* link);
  bool adopt_due_failures();
  Status lose(const std::string& message);
  Status break_up(const Status& status);
  void pass_on(const Status& failure, const Link& link);
  bool takes_part(int rank) const { return in_call_[static_cast<size_t>(rank)] != 0; }
  uint64_t common_calls(int rank) const { return counts_[static_cast<size_t>(rank)]; }
  std::string here() const;  // all_reduce "x" sum float32[3], collective 17 of ring "world"
  std::string during() const;
  std::string name_of_peer(const Link& link) const;
  std::string died(const Link& link) const;
  std::string cut_off(const Link& link, double seconds) const;
  std::string silent(const Link& link, int64_t now) const;

  const std::string name_;
  const uint64_t identity_;  // the same on all its ranks
  const int rank_;
  const int world_size_;
  const std::string host_;
  const int num_spins_;
  const Algorithm algorithm_;
  const double lost_seconds_;
  const double stall_seconds_;
  double timeout_seconds_;
  std::vector<int32_t> hosts_;  // [rank]: a number for the host it runs on

  // The turn: one call at a time, of any group.
  std::mutex turn_mutex_;
  std::condition_variable turn_;
  bool busy_ = false;
  const Group* busy_group_ = nullptr;  // whose call it is; null where it does not matter which comes first
  const char* busy_name_ = "";         // what that is called
  std::atomic<std::thread::id> runner_{};  // whose call it is
  std::atomic<bool> closing_{false};
  bool released_ = false;

  // State shared by a call, the watcher and close().
  std::mutex control_mutex_;
  std::vector<std::unique_ptr<Link>> links_;  // [rank]; null where there is none
  Status failure_;                            // calls fail with it, once it is set
  bool broke_in_call_ = false;                // it came while a call was under way
  std::atomic<bool> interrupted_{false};      // this rank's doing
  bool told_ = false;                         // the caller knows failure_
  // Numbers of calls that each rank and this one have begun together: the two count alike. A rank that gives
  // up in a later one than this rank's has sent all that this rank needs to finish those before.
  std::vector<uint64_t> counts_;    // [rank]
  std::vector<uint64_t> num_sent_;  // [rank]: of these the sends to it, and the receives from it
  std::vector<uint64_t> num_received_;
  std::vector<uint8_t> in_call_;  // [rank]: it takes part in the call begun last
  uint64_t num_calls_ = 0;        // begun, of any group
  RingState state_;               // for the process's other worlds to read
  uint32_t num_chain_ = 0;        // of this rank's pongs: for whom the call under way waits in the end
  decltype(Pong::chain) chain_{};
  bool begun_any_ = false;
  bool running_ = false;  // the call begun last is under way
  CallHeader header_{};
  std::array<Past, 8> past_;  // the collectives begun last
  size_t num_past_ = 0;
  Fd news_fd_;  // wakes the call under way

  // The call in progress.
  Group* group_ = nullptr;
  Plan plan_;
  Schedule schedule_;
  std::vector<Range> chunks_;
  std::vector<const void*> slots_;
  int32_t caller_ = TFRING_ANY_THREAD;
  bool of_all_ = false;
  bool on_pool_thread_ = false;
  RowSums row_sums_;
  std::unique_ptr<char[]> scratch_;
  int64_t scratch_bytes_ = 0;

  bool traced_ = false;
  tfring_record record_{};

  // The progress of its execution.
  int num_moves_ = 0;
  int num_idle_ = 0;        // looks in vain since something moved
  int spins_ = 0;           // how many of them before it lets others run,
  int yields_ = 0;          // and after how many more it sleeps
  int64_t idle_since_ = 0;  // nanoseconds
  int64_t looked_up_ = 0;   // when signals and news were looked at last
  bool warned_ = false;     // of this standstill
  std::atomic<bool> stands_still_{false};
  int num_asks_ = 0;
  bool crosses_ = false;         // two ranks wait for each other in two rings
  uint64_t elsewhere_ = 0;       // the ring in which the peer waits that this rank waits for here,
  int64_t elsewhere_since_ = 0;  // at least since then,
  int64_t used_[2] = {0, 0};     // when this process and the peer's had used so much of processors
  std::vector<pollfd> poll_fds_;

  tfring_statistics statistics_{};
};

// Sets the options of a control connection, which is never long without traffic.
void prepare_control(int fd, double lost_seconds);

std::string seconds_text(double seconds);

}  // namespace tfring
