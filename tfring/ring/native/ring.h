// A rank's place in one ring: its two neighbours, and the collectives it runs with them.
//
//     previous ──data──► this rank ──data──► next        control frames go both ways beside each arrow
//
//   ring.cc      the collectives: what each plans before it runs
//   gather.cc    the one whose sizes are learned on the way
//   execute.cc   the execution: move bytes while any move
//   wait.cc      what happens when none move: sleep, and ask why
//   liveness.cc  neighbours that leave, die, stop or are cut off; on the watcher's thread, in a collective or
//   not
//
// Nothing is allocated while bytes move: plans keep their memory from one collective to the next, and scratch
// grows before the first byte is sent.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "channel.h"
#include "core.h"
#include "fd.h"
#include "frame.h"
#include "plan.h"
#include "status.h"
#include "watcher.h"

namespace tfring {

class Ring final : private Watched {
 public:
  // Takes over the descriptors. Returns once all ranks have opened the ring.
  static Status open(const tfring_options& options, std::shared_ptr<Ring>* ring);
  ~Ring() override;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  Status all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status all_gather(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                    tfring_place place, void* context);
  Status reduce_scatter(const tfring_call& call, const tfring_tensor& tensor);
  Status broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status barrier(const tfring_call& call);

  tfring_statistics statistics();
  // The first failure, after which nothing works; ok if there was none.
  Status failure();
  void abort(const Status& why);
  void close();

 private:
  enum Side { kPrevious = 0, kNext = 1 };

  // A neighbour's control connection, and what it has told. Guarded by control_mutex_.
  struct Control {
    Fd fd;
    int rank = -1;
    std::string host;
    bool left = false;           // it said goodbye,
    uint64_t left_finished = 0;  // having finished this many collectives
    bool closed = false;         // nothing more comes
    size_t fill = 0;             // bytes of `frame` read so far
    ControlFrame frame{};
    int64_t heard = 0;  // nanoseconds: its last sign of life; 0: the ring is not open yet
    int64_t asked = 0;  // the last ping
    int unanswered = 0;
    int64_t answered = 0;  // the last pong, which told
    uint64_t begun = 0;    // how many collectives it has begun
    Pong pong{};
  };

  explicit Ring(const tfring_options& options);
  Status connect(const tfring_options& options);

  // ring.cc
  Status check(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) const;
  Status begin(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  template <typename Body>
  Status run(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors, Body body);
  Status enter(const tfring_call& call);
  void leave();
  void release();
  Status small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status large_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run_reduce_scatter(const tfring_call& call, const tfring_tensor& tensor);
  Status run_broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status need_scratch(int64_t size);

  // gather.cc
  struct Gather;
  Status run_all_gather(const tfring_tensor* tensors, int num_tensors, tfring_place place, void* context);
  Status gather_rows(Gather* gather);
  Status learn_block(Gather* gather, int rank);
  Status place_rows(const Gather& gather, void* const* outputs);

  // execute.cc
  enum Header { kWithoutHeader = 0, kWithHeader = 1 };
  Status execute(Header header);
  Status move_all();
  bool done() const;
  int64_t sendable() const;
  bool may_receive() const;
  int64_t least_receivable() const;
  void skip_idle_steps();
  Status send_some(bool* moved);
  Status receive_some(bool* moved);
  Status receive_header(bool* moved);
  Status receive_step(const Step& step, int64_t* got);

  // wait.cc
  Status wait();
  void sleep(int milliseconds);
  void sleep_for_news();
  Status look_up(int64_t now);
  Status interruption();
  Status check_news();
  void stand_still(bool stands);
  Status ask_why(int64_t now, double idle_seconds);
  Status neighbour_gone(Side side);
  Status fail(Code code, const std::string& message);

  // liveness.cc: all but the first three and here() with control_mutex_ held
  void start_asking();
  int watch(int64_t now, int64_t late, std::vector<pollfd>* fds) override;
  void announce();
  void read_control(Side side, int64_t now);
  void take_control(Side side);
  void send_control(Side side, const ControlFrame& frame);
  void ask(Side side, int64_t now, double period);
  void answer(Side side);
  Status lose(const std::string& message);
  Status fail_from(uint64_t sequence, const Status& status);
  uint64_t current() const { return running_ ? sequence_ : sequence_ + 1; }
  std::string here() const;  // all_reduce "x" sum float32[3], collective 17 of ring "world"
  std::string during() const;
  std::string name_of_peer(const Control& control) const;
  std::string died(const Control& control) const;
  std::string cut_off(const Control& control, double seconds) const;
  std::string silent(const Control& control, int64_t now) const;

  const std::string name_;
  const uint64_t identity_;  // of the ring, the same on all its ranks
  const int rank_;
  const int world_size_;
  const std::string host_;
  const int num_spins_;
  const double lost_seconds_;
  const double stall_seconds_;
  double timeout_seconds_;

  // Whose turn it is: one collective at a time.
  std::mutex turn_mutex_;
  std::condition_variable turn_;
  bool busy_ = false;
  std::atomic<std::thread::id> runner_{};  // whose collective it is
  std::atomic<bool> closing_{false};
  bool released_ = false;

  // What a collective, the watcher and close() share.
  std::mutex control_mutex_;
  Control controls_[2];
  Status failure_;                    // collectives fail with it,
  uint64_t fails_from_ = UINT64_MAX;  // from this one on: a rank that fails in a later collective than this
                                      // rank's has sent all that this rank needs to finish the ones before
  std::atomic<bool> interrupted_{false};  // this rank's doing
  bool told_ = false;                     // the caller knows failure_
  uint64_t sequence_ =
      UINT64_MAX;  // of the collective begun last: 0 is the opening barrier, 1 the user's first
  std::atomic<uint64_t> begun_{0};  // sequence_ + 1, for the process's other rings to read
  bool running_ = false;            // it is under way
  uint64_t finished_ = 0;           // collectives completed, the opening included
  CallHeader header_{};
  Fd news_fd_;  // wakes the collective under way

  std::unique_ptr<Mailbox> own_mailbox_;
  std::unique_ptr<Mailbox> neighbour_mailboxes_[2];
  std::unique_ptr<Sender> sender_;      // to the next rank
  std::unique_ptr<Receiver> receiver_;  // from the previous rank

  // The collective in progress.
  CallHeader their_header_{};
  Plan plan_;
  int32_t caller_ = TFRING_ANY_THREAD;
  bool on_pool_thread_ = false;
  std::unique_ptr<char[]> scratch_;
  int64_t scratch_bytes_ = 0;

  // How far its execution is.
  int64_t header_sent_ = 0;
  bool header_received_ = false;
  size_t send_step_ = 0;
  int64_t sent_ = 0;
  size_t recv_step_ = 0;
  int64_t received_ = 0;
  int num_moves_ = 0;
  int num_idle_ = 0;        // looks in vain since something moved
  int64_t idle_since_ = 0;  // nanoseconds
  int64_t looked_up_ = 0;   // when signals and news were looked at last
  bool warned_ = false;     // of this standstill
  bool stands_still_ = false;

  tfring_statistics statistics_{};
};

// Of a control connection, which is never long without traffic.
void prepare_control(int fd, double lost_seconds);

std::string seconds_text(double seconds);

}  // namespace tfring
