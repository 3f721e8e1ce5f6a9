// The collectives: what each one plans before it runs.
#include "ring.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace tfring {
namespace {

int64_t row_bytes(const tfring_tensor& tensor) {
  int64_t size = size_of(static_cast<DType>(tensor.dtype));
  for (int i = 1; i < tensor.num_dims; ++i) size *= tensor.dims[i];
  return size;
}

int64_t num_bytes(const tfring_tensor& tensor) {
  return tensor.num_dims == 0 ? size_of(static_cast<DType>(tensor.dtype))
                              : tensor.dims[0] * row_bytes(tensor);
}

int64_t num_bytes(const tfring_tensor* tensors, int num_tensors) {
  int64_t total = 0;
  for (int t = 0; t < num_tensors; ++t) total += num_bytes(tensors[t]);
  return total;
}

// `from` null stands for zeros.
void copy(void* to, const void* from, int64_t size) {
  if (size == 0 || to == from) return;
  if (from == nullptr) {
    std::memset(to, 0, static_cast<size_t>(size));
  } else {
    std::memcpy(to, from, static_cast<size_t>(size));
  }
}

// What this rank adds: zeros where it is inactive.
const void* contribution(const tfring_call& call, const tfring_tensor& tensor) {
  return call.inactive ? nullptr : tensor.input;
}

bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }
bool by_rows(Kind kind) { return kind == Kind::kAllGather || kind == Kind::kReduceScatter; }

}  // namespace

Ring::Ring(const tfring_options& options)
    : name_(options.name),
      rank_(options.rank),
      world_size_(options.world_size),
      // Over TCP each look is a system call.
      num_spins_(options.mailbox_fd >= 0 ? options.num_spins : options.num_spins / 10),
      timeout_seconds_(options.opening_timeout_seconds) {}

Ring::~Ring() { close(); }

Status Ring::open(const tfring_options& options, std::shared_ptr<Ring>* ring) {
  ring->reset(new Ring(options));
  TFRING_TRY((*ring)->connect(options));
  const tfring_call opening{"opening", 0, 0, 0, 1};
  TFRING_TRY((*ring)->barrier(opening));
  (*ring)->statistics_ = tfring_statistics{};
  (*ring)->timeout_seconds_ = options.timeout_seconds;
  return {};
}

Status Ring::connect(const tfring_options& options) {
  if (world_size_ == 1) return {};
  const tfring_link links[2] = {options.previous, options.next};
  for (Side side : {kPrevious, kNext}) {
    Control& control = controls_[side];
    control.fd = links[side].control_fd;
    control.rank = wrap(rank_ + (side == kNext ? 1 : -1), world_size_);
    fcntl(control.fd, F_SETFL, fcntl(control.fd, F_GETFL) | O_NONBLOCK);
  }
  bool mapped = true;
  const auto map = [&](int memory_fd, int doorbell_fd) {
    std::unique_ptr<Mailbox> mailbox;
    if (memory_fd >= 0) {
      mailbox = Mailbox::open(memory_fd, doorbell_fd);
      mapped = mapped && mailbox != nullptr;
    }
    return mailbox;
  };
  own_mailbox_ = map(options.mailbox_fd, options.doorbell_fd);
  for (Side side : {kPrevious, kNext}) {
    neighbour_mailboxes_[side] = map(links[side].mailbox_fd, links[side].doorbell_fd);
  }
  if (links[kNext].data_fd >= 0) sender_ = make_tcp_sender(links[kNext].data_fd);
  if (links[kPrevious].data_fd >= 0) receiver_ = make_tcp_receiver(links[kPrevious].data_fd);
  if (!mapped) return fail(Code::kInternal, "rank " + std::to_string(rank_) + " could not map shared memory");
  if (sender_ == nullptr) sender_ = make_shm_sender(neighbour_mailboxes_[kNext].get());
  if (receiver_ == nullptr) {
    receiver_ = make_shm_receiver(own_mailbox_.get(), neighbour_mailboxes_[kPrevious].get());
  }
  return {};
}

void Ring::close() {
  closing_ = true;  // a collective in another thread sees it and fails
  std::lock_guard<std::mutex> lock(mutex_);
  for (Side side : {kPrevious, kNext}) {
    Control& control = controls_[side];
    if (control.fd < 0) continue;
    send_control(side, make_control(ControlType::kGoodbye, rank_, finished_));
    ::close(control.fd);
    control.fd = -1;
  }
  sender_.reset();
  receiver_.reset();
  own_mailbox_.reset();
  for (auto& mailbox : neighbour_mailboxes_) mailbox.reset();
  if (broken_.ok()) broken_ = Status(Code::kInvalid, "it was closed");
}

tfring_statistics Ring::statistics() {
  std::lock_guard<std::mutex> lock(mutex_);
  tfring_statistics statistics = statistics_;
  statistics.scratch_bytes = scratch_bytes_;
  return statistics;
}

Status Ring::need_scratch(int64_t size) {
  if (scratch_bytes_ >= size) return {};
  scratch_.reset();
  scratch_bytes_ = 0;
  scratch_.reset(new (std::nothrow) char[static_cast<size_t>(size)]);
  if (scratch_ == nullptr) {
    return fail(Code::kInternal, "rank " + std::to_string(rank_) + " has no memory for " +
                                     std::to_string(size) + " bytes of scratch in " + here());
  }
  scratch_bytes_ = size;
  return {};
}

// What can be said without asking the other ranks; a rank refused here has not begun, and may go on.
Status Ring::check(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) const {
  const auto invalid = [&](const std::string& rule) {
    return Status(Code::kInvalid, std::string(name_of(kind)) + " \"" + call.name + "\": " + rule);
  };
  for (int t = 0; t < num_tensors; ++t) {
    const DType dtype = static_cast<DType>(tensors[t].dtype);
    if (size_of(dtype) == 0)
      return invalid("the ring carries no dtype number " + std::to_string(tensors[t].dtype));
    if (reduces(kind) && !can_reduce(dtype, static_cast<Op>(call.op))) {
      if (dtype != DType::kBool)
        return invalid(std::string("numbers of ") + name_of(dtype) + " have no order");
      return invalid(
          "bool has no sum. Use op=\"max\" for any, op=\"min\" for all, or cast to an integer to count");
    }
    if (reduces(kind) && tensors[t].dtype != tensors[0].dtype) {
      return invalid(std::string("tensors reduced together share one dtype. Received: ") +
                     name_of(static_cast<DType>(tensors[0].dtype)) + " and " + name_of(dtype));
    }
    if (by_rows(kind) && tensors[t].num_dims == 0) {
      return invalid("it works on rows, so tensors have at least one dimension. Received: a scalar");
    }
  }
  if (kind == Kind::kBroadcast && (call.root < 0 || call.root >= world_size_)) {
    return invalid("root runs from 0 to " + std::to_string(world_size_ - 1) +
                   ". Received: root=" + std::to_string(call.root));
  }
  return {};
}

Status Ring::begin(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  if (broken_.ok() && !pending_abort_.ok()) return broken_ = pending_abort_;
  if (!broken_.ok()) {
    return {broken_.code, "ring \"" + name_ + "\" can no longer be used: " + broken_.message};
  }
  TFRING_TRY(check(kind, call, tensors, num_tensors));
  check_signals_ = call.check_signals != 0;
  header_ = make_header(kind, call, tensors, num_tensors, ++sequence_);
  plan_.clear();
  plan_.dtype = num_tensors > 0 ? static_cast<DType>(tensors[0].dtype) : DType::kUint8;
  plan_.op = static_cast<Op>(call.op);
  statistics_.collectives[static_cast<int>(kind)] += 1;
  return {};
}

Status Ring::run(Kind kind, const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  std::lock_guard<std::mutex> lock(mutex_);
  TFRING_TRY(begin(kind, call, tensors, num_tensors));
  TFRING_TRY(plan_and_execute(kind, call, tensors, num_tensors));
  ++finished_;
  return {};
}

Status Ring::plan_and_execute(Kind kind, const tfring_call& call, const tfring_tensor* tensors,
                              int num_tensors) {
  switch (kind) {
    case Kind::kBarrier:
      return small_all_reduce(call, tensors, 0);
    case Kind::kAllReduce:
      return is_small(num_bytes(tensors, num_tensors), world_size_)
                 ? small_all_reduce(call, tensors, num_tensors)
                 : large_all_reduce(call, tensors, num_tensors);
    case Kind::kReduceScatter:
      return run_reduce_scatter(call, tensors[0]);
    case Kind::kBroadcast:
      return run_broadcast(call, tensors, num_tensors);
    case Kind::kAllGather:
      break;
  }
  return fail(Code::kInternal, "an all_gather runs in two halves");
}

Status Ring::all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  return run(Kind::kAllReduce, call, tensors, num_tensors);
}
Status Ring::reduce_scatter(const tfring_call& call, const tfring_tensor& tensor) {
  return run(Kind::kReduceScatter, call, &tensor, 1);
}
Status Ring::broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  return run(Kind::kBroadcast, call, tensors, num_tensors);
}
Status Ring::barrier(const tfring_call& call) { return run(Kind::kBarrier, call, nullptr, 0); }

// Every contribution goes round whole; each rank then adds them up in rank order.
Status Ring::small_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const int64_t size = num_bytes(tensors, num_tensors);
  TFRING_TRY(need_scratch(size * world_size_));
  char* const all = scratch_.get();
  char* mine = all + rank_ * size;
  for (int t = 0; t < num_tensors; ++t) {
    copy(mine, contribution(call, tensors[t]), num_bytes(tensors[t]));
    mine += num_bytes(tensors[t]);
  }
  plan_.spans.add(all, all, size * world_size_);
  for (int s = 0; s < num_all_gather_steps(world_size_); ++s) {
    const ScheduleStep step = all_gather_step(rank_, world_size_, s);
    plan_.steps.push_back({{step.send * size, size}, {step.recv * size, size}, true, true, false, false});
  }
  TFRING_TRY(execute(kWithHeader));
  const int64_t count = size / size_of(plan_.dtype);
  for (int r = 1; r < world_size_; ++r) reduce(plan_.dtype, plan_.op, all, all, all + r * size, count);
  const char* sum = all;
  for (int t = 0; t < num_tensors; ++t) {
    copy(tensors[t].output, sum, num_bytes(tensors[t]));
    sum += num_bytes(tensors[t]);
  }
  return {};
}

// Reduce-scatter, then all-gather, as one stream of 2 (N - 1) steps. Each chunk is added up on its way round,
// one rank after the other, and the sum is passed on, so all ranks hold the same bits. The input is read
// where it lies: the addition writes the output.
Status Ring::large_all_reduce(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  for (int t = 0; t < num_tensors; ++t) {
    const void* input = contribution(call, tensors[t]);
    if (world_size_ == 1) copy(tensors[t].output, input, num_bytes(tensors[t]));
    plan_.spans.add(input, tensors[t].output, num_bytes(tensors[t]));
  }
  const int64_t item = size_of(plan_.dtype);
  const auto bytes_of = [&](int chunk) {
    const Range range = chunk_of(plan_.spans.size() / item, world_size_, chunk);
    return Range{range.begin * item, range.size * item};
  };
  for (int s = 0; s < num_all_reduce_steps(world_size_); ++s) {
    const ScheduleStep step = all_reduce_step(rank_, world_size_, s);
    plan_.steps.push_back({bytes_of(step.send), bytes_of(step.recv), true, true, s == 0, step.reduce});
  }
  return execute(kWithHeader);
}

// As the first half of an all_reduce, one chunk further on, so that rank r ends with chunk r. Partial sums
// live in two scratch buffers used in turn.
Status Ring::run_reduce_scatter(const tfring_call& call, const tfring_tensor& tensor) {
  const int64_t row = row_bytes(tensor);
  const int num_steps = num_reduce_scatter_steps(world_size_);
  const int64_t largest = chunk_of(tensor.dims[0], world_size_, 0).size * row;
  if (num_steps > 1) TFRING_TRY(need_scratch(2 * largest));
  const char* input = static_cast<const char*>(contribution(call, tensor));
  if (world_size_ == 1) copy(tensor.output, input, num_bytes(tensor));
  const auto bytes_of = [&](int chunk) {
    const Range range = chunk_of(tensor.dims[0], world_size_, chunk);
    return Range{range.begin * row, range.size * row};
  };
  for (int chunk = 0; chunk < world_size_; ++chunk) {
    const int s = wrap(rank_ - chunk - 2, world_size_);  // the step that receives this chunk
    const Range range = bytes_of(chunk);
    char* out = chunk == rank_ ? static_cast<char*>(tensor.output) : scratch_.get();
    if (chunk != rank_ && num_steps > 1) out += (s % 2) * largest;
    plan_.spans.add(input == nullptr ? nullptr : input + range.begin, out, range.size);
  }
  for (int s = 0; s < num_steps; ++s) {
    const ScheduleStep step = reduce_scatter_step(rank_, world_size_, s);
    plan_.steps.push_back({bytes_of(step.send), bytes_of(step.recv), true, true, s == 0, true});
  }
  return execute(kWithHeader);
}

Status Ring::run_broadcast(const tfring_call& call, const tfring_tensor* tensors, int num_tensors) {
  const bool is_root = rank_ == call.root;
  for (int t = 0; t < num_tensors; ++t) {
    plan_.spans.add(tensors[t].input, tensors[t].output, num_bytes(tensors[t]));
  }
  const Range chunks[2] = {{0, plan_.spans.size()}, {0, 0}};
  for (int s = 0; s < num_broadcast_steps() && world_size_ > 1; ++s) {
    const ScheduleStep step = broadcast_step(rank_, world_size_, call.root, s);
    plan_.steps.push_back({step.send < 0 ? Range{} : chunks[step.send],
                           step.recv < 0 ? Range{} : chunks[step.recv], step.send >= 0, step.recv >= 0,
                           is_root, false});
  }
  TFRING_TRY(execute(kWithHeader));
  for (int t = 0; t < num_tensors && is_root; ++t) {
    copy(tensors[t].output, tensors[t].input, num_bytes(tensors[t]));
  }
  return {};
}

Status Ring::all_gather_begin(const tfring_call& call, const tfring_tensor* tensors, int num_tensors,
                              int64_t* rows) {
  std::unique_lock<std::mutex> lock(mutex_);
  TFRING_TRY(begin(Kind::kAllGather, call, tensors, num_tensors));
  const size_t count = static_cast<size_t>(num_tensors);
  gather_tensors_.assign(tensors, tensors + num_tensors);
  gather_row_bytes_.clear();
  gather_rows_.assign(static_cast<size_t>(world_size_) * count, 0);
  gather_bytes_.assign(static_cast<size_t>(world_size_), 0);
  for (size_t t = 0; t < count; ++t) {
    gather_row_bytes_.push_back(row_bytes(tensors[t]));
    gather_rows_[static_cast<size_t>(rank_) * count + t] = tensors[t].dims[0];
  }
  learning_rows_ = true;
  const Status status = gather_rows();
  learning_rows_ = false;
  TFRING_TRY(status);
  std::copy(gather_rows_.begin(), gather_rows_.end(), rows);
  gather_lock_ = std::move(lock);
  return {};
}

// The first half: every rank's numbers of rows go round, and with them its rows where they are few. Each step
// of the schedule becomes two: the numbers, whose size is known, then the rows, whose size the numbers tell.
//
//     spans:  numbers of rank 0 | numbers of rank 1 | ... | slot of rank 0 | slot of rank 1 | ...
Status Ring::gather_rows() {
  const int64_t numbers = static_cast<int64_t>(gather_tensors_.size() * sizeof(int64_t));
  const int64_t slot = kSmallBytes / world_size_;
  TFRING_TRY(need_scratch(slot * world_size_));
  plan_.spans.add(gather_rows_.data(), gather_rows_.data(), numbers * world_size_);
  plan_.spans.add(scratch_.get(), scratch_.get(), slot * world_size_);
  plan_.lag = 2;
  for (int s = 0; s < num_all_gather_steps(world_size_); ++s) {
    const ScheduleStep step = all_gather_step(rank_, world_size_, s);
    plan_.steps.push_back(
        {{step.send * numbers, numbers}, {step.recv * numbers, numbers}, true, true, false, false});
    plan_.steps.push_back({{}, {}, false, false, false, false});
  }
  learn_block(rank_);
  if (is_small(gather_bytes_[static_cast<size_t>(rank_)], world_size_)) {
    char* to = scratch_.get() + rank_ * slot;
    for (const tfring_tensor& tensor : gather_tensors_) {
      copy(to, tensor.input, num_bytes(tensor));
      to += num_bytes(tensor);
    }
  }
  return execute(kWithHeader);
}

// Knowing how many rows a rank has, settles the steps in which they come and go.
void Ring::learn_block(int rank) {
  const size_t count = gather_tensors_.size();
  int64_t size = 0;
  for (size_t t = 0; t < count; ++t)
    size += gather_rows_[static_cast<size_t>(rank) * count + t] * gather_row_bytes_[t];
  gather_bytes_[static_cast<size_t>(rank)] = size;
  if (size == 0 || !is_small(size, world_size_)) return;
  const int64_t numbers = static_cast<int64_t>(count * sizeof(int64_t));
  const Range block{numbers * world_size_ + rank * (kSmallBytes / world_size_), size};
  const size_t sending =
      static_cast<size_t>(wrap(rank_ - rank, world_size_));  // all_gather_step sends it then,
  const size_t num_steps = static_cast<size_t>(num_all_gather_steps(world_size_));
  if (sending < num_steps) {
    plan_.steps[2 * sending + 1].send = block;
    plan_.steps[2 * sending + 1].sends = true;
  }
  if (sending > 0) {  // and receives it the step before
    plan_.steps[2 * sending - 1].recv = block;
    plan_.steps[2 * sending - 1].receives = true;
  }
}

Status Ring::all_gather_finish(void* const* outputs) {
  const std::unique_lock<std::mutex> lock = std::move(gather_lock_);
  if (!lock.owns_lock()) return {Code::kInternal, "all_gather_finish without all_gather_begin"};
  if (outputs == nullptr) {
    return fail(Code::kPeerLost, "rank " + std::to_string(rank_) + " gave up during " + here());
  }
  plan_.clear();
  TFRING_TRY(place_rows(outputs));
  ++finished_;
  return {};
}

// The second half: what came with the numbers is put in its place; blocks too large for that go round now.
Status Ring::place_rows(void* const* outputs) {
  const size_t count = gather_tensors_.size();
  gather_blocks_.clear();
  gather_filled_.assign(count, 0);
  for (int r = 0; r < world_size_; ++r) {
    const bool small = is_small(gather_bytes_[static_cast<size_t>(r)], world_size_);
    const char* slot = scratch_.get() + r * (kSmallBytes / world_size_);
    const int64_t begin = plan_.spans.size();
    for (size_t t = 0; t < count; ++t) {
      const int64_t size = gather_rows_[static_cast<size_t>(r) * count + t] * gather_row_bytes_[t];
      char* out = static_cast<char*>(outputs[t]) + gather_filled_[t];
      gather_filled_[t] += size;
      if (r == rank_) {
        copy(out, gather_tensors_[t].input, size);
      } else if (small) {
        copy(out, slot, size);
        slot += size;
      }
      plan_.spans.add(out, out, size);
    }
    gather_blocks_.push_back({begin, small ? 0 : plan_.spans.size() - begin});
  }
  for (int s = 0; s < num_all_gather_steps(world_size_); ++s) {
    const ScheduleStep step = all_gather_step(rank_, world_size_, s);
    const Range send = gather_blocks_[static_cast<size_t>(step.send)];
    const Range recv = gather_blocks_[static_cast<size_t>(step.recv)];
    plan_.steps.push_back({send, recv, send.size > 0, recv.size > 0, false, false});
  }
  return execute(kWithoutHeader);
}

}  // namespace tfring
