// The execution of a plan: move bytes while any move.
//
// Sending and receiving each go through the steps at their own pace. What is sent in step s came in with step
// s - lag, so sending may follow receiving byte by byte: a large buffer streams round the ring, and adding
// one part overlaps the transfer of the next.
#include <algorithm>
#include <cstring>

#include "clock.h"
#include "kernels.h"
#include "process.h"
#include "ring.h"

namespace tfring {
namespace {

constexpr int64_t kSegmentBytes = 256 * 1024;  // moved one way before the other way gets its turn
constexpr int64_t kLargeBytes = 1024 * 1024;   // from here on a collective's time tells something
constexpr int kMovesToLookUp = 64;             // after so many, see to Ctrl-C
constexpr int kMaxParts = 16;                  // of one call into a channel
constexpr int64_t kZeroBytes = 16 * 1024;
alignas(64) const char kZeros[kZeroBytes] = {};

// A step of no bytes sends one filler byte; see frame.h.
int64_t wire_size(const Range& range) { return std::max<int64_t>(range.size, 1); }

}  // namespace

Status Ring::execute(Header header) {
  header_sent_ = header == kWithHeader ? 0 : static_cast<int64_t>(sizeof(header_));
  header_received_ = header != kWithHeader;
  send_step_ = recv_step_ = 0;
  sent_ = received_ = 0;
  num_idle_ = num_moves_ = 0;
  warned_ = false;
  if (world_size_ == 1) return {};
  skip_idle_steps();
  const Status status = move_all();
  stand_still(false);
  return status;
}

Status Ring::move_all() {
  if (caller_ == TFRING_TENSORFLOW_OP && op_interrupted()) return interruption();
  const bool large = plan_.spans.size() >= kLargeBytes;
  int64_t start = 0;
  while (!done()) {
    bool moved = false;
    TFRING_TRY(send_some(&moved));
    TFRING_TRY(receive_some(&moved));
    if (moved) {
      num_idle_ = 0;
      warned_ = false;
      stand_still(false);
      if (++num_moves_ % kMovesToLookUp == 0) TFRING_TRY(look_up(now_nanoseconds()));
      if (large && start == 0 && header_received_) start = now_nanoseconds();
    } else {
      TFRING_TRY(wait());
    }
  }
  if (large) {
    sender_->learn(seconds_between(start, now_nanoseconds()) / static_cast<double>(plan_.spans.size()));
  }
  return {};
}

bool Ring::done() const {
  return header_received_ && header_sent_ == sizeof(header_) && send_step_ == plan_.steps.size() &&
         recv_step_ == plan_.steps.size();
}

void Ring::skip_idle_steps() {
  const auto& steps = plan_.steps;
  while (send_step_ < steps.size() && !steps[send_step_].sends) ++send_step_;
  while (recv_step_ < steps.size() && !steps[recv_step_].receives) ++recv_step_;
}

// Bytes of the current step that are there to be sent.
int64_t Ring::sendable() const {
  if (send_step_ == plan_.steps.size()) return 0;
  const Range& range = plan_.steps[send_step_].send;
  if (recv_step_ + plan_.lag > send_step_) return wire_size(range) - sent_;
  if (recv_step_ + plan_.lag == send_step_) return std::min(range.size, received_) - sent_;
  return 0;
}

// The memory of a step may be that of an earlier send (scratch used in turn), so those sends come first.
bool Ring::may_receive() const {
  return !header_received_ || (recv_step_ < plan_.steps.size() && recv_step_ < send_step_ + plan_.lag);
}

// Fewer bytes than this are of no use now.
int64_t Ring::least_receivable() const {
  if (!header_received_) return sizeof(their_header_);
  return plan_.steps[recv_step_].reduce ? size_of(plan_.dtype) : 1;
}

Status Ring::send_some(bool* moved) {
  iovec parts[kMaxParts];
  int num_parts = 0;
  const int64_t header_left = static_cast<int64_t>(sizeof(header_)) - header_sent_;
  if (header_left > 0) {
    parts[num_parts++] = {reinterpret_cast<char*>(&header_) + header_sent_, static_cast<size_t>(header_left)};
  }
  int64_t left = std::min(sendable(), kSegmentBytes);
  if (left > 0) {
    const Step& step = plan_.steps[send_step_];
    int64_t position = step.send.begin + sent_;
    if (step.send.size == 0) {
      parts[num_parts++] = {const_cast<char*>(kZeros), 1};
      left = 0;
    }
    while (left > 0 && num_parts < kMaxParts) {
      Spans::Span span = plan_.spans.at(position, left);
      const char* from = step.send_input ? span.in : span.out;
      if (from == nullptr) {
        from = kZeros;
        span.size = std::min(span.size, kZeroBytes);
      }
      parts[num_parts++] = {const_cast<char*>(from), static_cast<size_t>(span.size)};
      position += span.size;
      left -= span.size;
    }
  }
  if (num_parts == 0) return {};
  const int64_t taken = sender_->send(parts, num_parts);
  if (taken == kGone) return neighbour_gone(kNext);
  if (taken == 0) return {};
  *moved = true;
  statistics_.bytes_sent += taken;
  const int64_t of_header = std::min(taken, header_left);
  header_sent_ += of_header;
  sent_ += taken - of_header;
  if (send_step_ < plan_.steps.size() && sent_ == wire_size(plan_.steps[send_step_].send)) {
    ++send_step_;
    sent_ = 0;
    skip_idle_steps();
  }
  return {};
}

Status Ring::receive_some(bool* moved) {
  if (!may_receive()) return {};
  if (!header_received_) return receive_header(moved);
  const Step& step = plan_.steps[recv_step_];
  int64_t got = 0;
  TFRING_TRY(receive_step(step, &got));
  if (got == 0) return {};
  *moved = true;
  statistics_.bytes_received += got;
  received_ += got;
  if (received_ == wire_size(step.recv)) {
    if (plan_.received) TFRING_TRY(plan_.received(recv_step_));
    ++recv_step_;
    received_ = 0;
    skip_idle_steps();
  }
  return {};
}

Status Ring::receive_header(bool* moved) {
  const char* data = nullptr;
  const int64_t available = receiver_->peek(sizeof(their_header_), &data);
  if (available == kGone) return neighbour_gone(kPrevious);
  if (available < static_cast<int64_t>(sizeof(their_header_))) return {};
  std::memcpy(&their_header_, data, sizeof(their_header_));
  receiver_->consume(sizeof(their_header_));
  statistics_.bytes_received += sizeof(their_header_);
  header_received_ = true;
  *moved = true;
  if (agree(header_, their_header_)) return {};
  const std::string previous = "rank " + std::to_string(controls_[kPrevious].rank);
  const std::string me = "rank " + std::to_string(rank_);
  if (their_header_.magic != kCallMagic || their_header_.version != kProtocolVersion) {
    return fail(Code::kInternal, previous + " sent " + me + " bytes that are no frame at " + here());
  }
  return fail(Code::kMismatch, "ranks disagree: " + previous + " called " + describe(their_header_) +
                                   " as collective " + std::to_string(their_header_.sequence) +
                                   " of ring \"" + name_ + "\", " + me + " called " + describe(header_) +
                                   " as collective " + std::to_string(header_.sequence));
}

// Receives what is there of a step, at most a segment, and adds it or puts it in place.
Status Ring::receive_step(const Step& step, int64_t* got) {
  int64_t left = std::min(wire_size(step.recv) - received_, kSegmentBytes);
  int64_t position = step.recv.begin + received_;
  if (step.recv.size == 0 || step.reduce) {
    const int64_t item = step.reduce ? size_of(plan_.dtype) : 1;
    const char* wire = nullptr;
    *got = receiver_->peek(step.recv.size == 0 ? 1 : item, &wire);
    if (*got == kGone) return neighbour_gone(kPrevious);
    if (step.recv.size == 0) {
      *got = std::min<int64_t>(*got, 1);
    } else {
      *got = left = std::min(*got, left) / item * item;
      while (left > 0) {
        Spans::Span span = plan_.spans.at(position, left);
        if (span.in == nullptr) span.size = std::min(span.size, kZeroBytes);
        reduce(plan_.dtype, plan_.op, span.out, span.in == nullptr ? kZeros : span.in, wire,
               span.size / item);
        wire += span.size;
        position += span.size;
        left -= span.size;
      }
    }
    if (*got > 0) receiver_->consume(*got);
    return {};
  }
  iovec parts[kMaxParts];
  int num_parts = 0;
  while (left > 0 && num_parts < kMaxParts) {
    const Spans::Span span = plan_.spans.at(position, left);
    parts[num_parts++] = {span.out, static_cast<size_t>(span.size)};
    position += span.size;
    left -= span.size;
  }
  *got = receiver_->receive(parts, num_parts);
  return *got == kGone ? neighbour_gone(kPrevious) : Status();
}

}  // namespace tfring
