// A rank's place in one ring: its two neighbours, and the collectives it runs with them.
//
//     previous ──data──► this rank ──data──► next        control frames go both ways beside each arrow
//
//   ring.cc      the collectives: what each plans before it runs
//   execute.cc   the execution: move bytes while any move
//   wait.cc      what happens when none move: sleep, and notice who is gone, stopped or of another mind
//
// Nothing is allocated while bytes move: plans keep their memory from one collective to the next, and scratch
// grows before the first byte is sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "channel.h"
#include "core.h"
#include "frame.h"
#include "plan.h"
#include "status.h"

namespace tfring {

class Ring {
 public:
  // Takes over the descriptors. Returns once all ranks have opened the ring.
  static Status open(const tfring_options& options, std::shared_ptr<Ring>* ring);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }

  Status all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status all_gather_begin(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                          int64_t* rows);
  Status all_gather_finish(void* const* outputs);
  Status reduce_scatter(const tfring_call& call, const tfring_tensor& tensor);
  Status broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status barrier(const tfring_call& call);

  tfring_statistics statistics();
  void close();

 private:
  enum Side { kPrevious = 0, kNext = 1 };

  // A neighbour's control connection, and what it has told.
  struct Control {
    int fd = -1;
    int rank = -1;
    bool left = false;           // it said goodbye,
    uint64_t left_finished = 0;  // having finished this many collectives
    bool answered = false;       // the last ping
    size_t fill = 0;             // bytes of `frame` read so far
    ControlFrame frame{};
  };

  explicit Ring(const tfring_options& options);
  Status connect(const tfring_options& options);

  // ring.cc
  Status check(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) const;
  Status begin(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status plan_and_execute(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status large_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status run_reduce_scatter(const tfring_call& call, const tfring_tensor& tensor);
  Status run_broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors);
  Status gather_rows();
  void learn_block(int rank);
  Status place_rows(void* const* outputs);
  Status need_scratch(int64_t size);

  // execute.cc
  enum Header { kWithoutHeader = 0, kWithHeader = 1 };
  Status execute(Header header);
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
  Status sleep(int milliseconds);
  Status suspect(double idle_seconds);
  Status check_left();
  Status read_control(Side side);
  Status take_control(Side side);
  void send_control(Side side, const ControlFrame& frame);
  Status neighbour_gone(Side side);
  Status died(Side side);
  Status fail(Code code, const std::string& message);
  std::string here() const;  // all_reduce "x" sum float32[3], collective 17 of ring "world"

  const std::string name_;
  const int rank_;
  const int world_size_;
  const int num_spins_;
  double timeout_seconds_;

  std::mutex mutex_;  // held during a collective
  std::atomic<bool> closing_{false};
  Status broken_;  // the first failure; nothing works after it
  // An abort raised by a rank in a later collective than this rank's. That rank has finished this one and
  // sent all it had to, so this rank can finish it, too, and fails in the next.
  Status pending_abort_;
  uint64_t sequence_ =
      UINT64_MAX;          // of the collective begun last: 0 is the opening barrier, 1 the user's first
  uint64_t finished_ = 0;  // collectives completed, the opening included

  Control controls_[2];
  std::unique_ptr<Mailbox> own_mailbox_;
  std::unique_ptr<Mailbox> neighbour_mailboxes_[2];
  std::unique_ptr<Sender> sender_;      // to the next rank
  std::unique_ptr<Receiver> receiver_;  // from the previous rank

  // The collective in progress.
  CallHeader header_{};
  CallHeader their_header_{};
  Plan plan_;
  bool check_signals_ = false;
  std::unique_ptr<char[]> scratch_;
  int64_t scratch_bytes_ = 0;

  // How far its execution is.
  int64_t header_sent_ = 0;
  bool header_received_ = false;
  size_t send_step_ = 0;
  int64_t sent_ = 0;
  size_t recv_step_ = 0;
  int64_t received_ = 0;
  int num_idle_ = 0;        // looks in vain since something moved
  int64_t idle_since_ = 0;  // nanoseconds
  bool suspecting_ = false;

  // An all_gather, from begin to finish.
  std::unique_lock<std::mutex> gather_lock_;
  bool learning_rows_ = false;
  std::vector<tfring_tensor> gather_tensors_;
  std::vector<int64_t> gather_row_bytes_;  // [tensor]
  std::vector<int64_t> gather_rows_;       // [rank][tensor]
  std::vector<int64_t> gather_bytes_;      // [rank]
  std::vector<Range> gather_blocks_;       // [rank]: positions in the plan; empty if small
  std::vector<int64_t> gather_filled_;     // [tensor]: bytes of the output in place

  tfring_statistics statistics_{};
};

// Lets Python's signal handlers run; true if one raised. Does nothing before tfring_use_python.
bool python_interrupted();

}  // namespace tfring
