// The execution of a plan: moves bytes as long as any can move.
//
// Each peer has a queue of sends and one of receives, which progress independently. A send of data that
// another receive brings follows it byte by byte, so a large buffer streams along a ring, and adding one part
// overlaps the transfer of the next.
#include "execute.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "clock.h"
#include "kernels.h"
#include "process.h"

namespace tfring {
namespace {

constexpr int64_t kSegmentBytes = 256 * 1024;  // moved in one direction before another gets its turn
constexpr int64_t kLargeBytes = 1024 * 1024;   // from this size a collective's time is meaningful
constexpr int kMovesToLookUp = 64;             // after this many, check for Ctrl-C
constexpr int kMaxParts = 16;                  // in one call of a channel
constexpr int64_t kZeroBytes = 16 * 1024;
alignas(64) const char kZeros[kZeroBytes] = {};

}  // namespace

Execution::Execution(const Settings& settings, Guarded<Liveness>* liveness, WakeEvent* wake_event)
    : settings_(settings),
      liveness_(*liveness),
      links_(settings.world_size),
      waiting_(settings, call_, plan_, links_, liveness, wake_event, &statistics_.seconds_waited) {}

Status Execution::execute(Until until) {
  const bool large = plan_.spans.size() >= kLargeBytes;
  waiting_.begin(large);
  if (call_.caller == TFRING_TENSORFLOW_OP && op_interrupted()) return waiting_.interrupt();
  int64_t start = 0;
  Status status;
  while (status.ok() && !plan_.is_done(until)) {
    bool moved = false;
    for (Queue& queue : plan_.queues) {
      if (queue.send >= 0) status = send_some(&queue, &moved);
      if (status.ok() && plan_.may_receive(queue)) status = receive_some(&queue, &moved);
      if (!status.ok()) break;
    }
    if (!status.ok()) break;
    if (moved) {
      waiting_.end();
      if (++num_moves_ % kMovesToLookUp == 0) status = waiting_.look_up(now_nanoseconds());
      if (large && start == 0 && plan_.queues[0].header_received) start = now_nanoseconds();
    } else {
      status = waiting_.wait();
    }
  }
  waiting_.end();
  if (large && status.ok() && until == Until::kDone) learn(start);
  return status;
}

// A ring reports its duration to each sender.
void Execution::learn(int64_t start) {
  Link* only = nullptr;
  for (const Queue& queue : plan_.queues) {
    if (!queue.sends_header) continue;
    if (only != nullptr) return;
    only = links_.to(queue.rank);
  }
  if (only == nullptr || start == 0) return;
  only->sender->learn(seconds_between(start, now_nanoseconds()) / static_cast<double>(plan_.spans.size()));
}

Status Execution::send_some(Queue* queue, bool* moved) {
  iovec parts[kMaxParts];
  int num_parts = 0;
  const int64_t header_left = kHeaderBytes - queue->header_sent;
  if (header_left > 0) {
    parts[num_parts++] = {reinterpret_cast<char*>(&call_.header) + queue->header_sent,
                          static_cast<size_t>(header_left)};
  }
  Transfer& transfer = plan_.sends[static_cast<size_t>(queue->send)];
  int64_t left = std::min(plan_.sendable(*queue), kSegmentBytes);
  if (left > 0) {
    int64_t position = transfer.range.begin + transfer.moved;
    if (transfer.range.size == 0) {
      parts[num_parts++] = {const_cast<char*>(kZeros), 1};
      left = 0;
    }
    while (left > 0 && num_parts < kMaxParts) {
      Spans::Span span = plan_.spans.at(position, left);
      const char* from = transfer.input ? span.in : span.out;
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
  Link* link = links_.to(queue->rank);
  const int64_t taken = link->sender->send(parts, num_parts);
  if (taken < 0) return cut_off(link->rank, taken);
  if (taken == 0) return {};
  *moved = true;
  statistics_.bytes_sent += taken;
  const int64_t of_header = std::min(taken, header_left);
  queue->header_sent += of_header;
  transfer.moved += taken - of_header;
  if (transfer.over()) {
    queue->send = transfer.next;
    --plan_.num_sends_left;
  }
  return {};
}

Status Execution::receive_some(Queue* queue, bool* moved) {
  if (!queue->header_received) return receive_header(queue, moved);
  Transfer& transfer = plan_.recvs[static_cast<size_t>(queue->recv)];
  int64_t got = 0;
  TFRING_TRY(receive_bytes(transfer, links_.to(queue->rank), &got));
  if (got == 0) return {};
  *moved = true;
  statistics_.bytes_received += got;
  transfer.moved += got;
  if (transfer.over()) {
    queue->recv = transfer.next;
    --plan_.num_recvs_left;
  }
  return {};
}

Status Execution::receive_header(Queue* queue, bool* moved) {
  Link* link = links_.to(queue->rank);
  CallHeader& theirs = link->their_header;
  const char* data = nullptr;
  const int64_t available = link->receiver->peek(kHeaderBytes, &data);
  if (available < 0) return cut_off(link->rank, available);
  if (available < kHeaderBytes) return {};
  std::memcpy(&theirs, data, sizeof(theirs));
  link->receiver->consume(kHeaderBytes);
  statistics_.bytes_received += kHeaderBytes;
  queue->header_received = true;
  record_.met(link->rank);
  *moved = true;
  if (agree(call_.header, theirs)) return {};
  const std::string who = "rank " + std::to_string(link->rank);
  const std::string me = "rank " + std::to_string(settings_.rank);
  if (theirs.magic != kCallMagic || theirs.version != kProtocolVersion) {
    return fail(Code::kInternal, who + " sent " + me + " bytes that are not a frame at " + here());
  }
  if (theirs.algorithm != call_.header.algorithm) {
    return fail(Code::kMismatch,
                "ranks disagree: " + who + " and " + me +
                    " use different algorithms. Set the same TFRING_ALGORITHM on "
                    "all ranks",
                Reason::kCallsDiffer, link->rank);
  }
  return liveness_.lock()->report_disagreement(link->rank, theirs, now_nanoseconds());
}

// Receives the available bytes of a transfer, at most a segment, and adds or stores them.
Status Execution::receive_bytes(const Transfer& transfer, Link* link, int64_t* got) {
  Receiver* receiver = link->receiver.get();
  int64_t left = std::min(plan_.receivable(transfer), kSegmentBytes);
  int64_t position = transfer.range.begin + transfer.moved;
  if (transfer.range.size == 0 || transfer.reduce) {
    const int64_t item = transfer.reduce ? size_of(plan_.dtype) : 1;
    const char* wire = nullptr;
    *got = receiver->peek(transfer.range.size == 0 ? 1 : item, &wire);
    if (*got < 0) return cut_off(link->rank, *got);
    if (transfer.range.size == 0) {
      *got = std::min<int64_t>(*got, 1);
    } else {
      *got = left = std::min(*got, left) / item * item;
      const Stopwatch stopwatch(record_.adding());
      while (left > 0) {
        Spans::Span span = plan_.spans.at(position, left);
        const char* other = transfer.input ? span.in : span.out;
        if (other == nullptr) {
          other = kZeros;
          span.size = std::min(span.size, kZeroBytes);
        }
        tfring::reduce(plan_.dtype, plan_.op, span.out, other, wire, span.size / item);
        wire += span.size;
        position += span.size;
        left -= span.size;
      }
    }
    if (*got > 0) receiver->consume(*got);
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
  *got = receiver->receive(parts, num_parts);
  return *got < 0 ? cut_off(link->rank, *got) : Status();
}

Status Execution::cut_off(int rank, int64_t why) {
  if (why == kGone) return waiting_.peer_gone(rank);
  return fail(Code::kPeerLost,
              "what arrived from rank " + std::to_string(rank) + " at " + here() +
                  " is not what it encrypted: the data was changed on the way",
              Reason::kCutOff, rank);
}

Status Execution::fail(Code code, const std::string& message, Reason reason, int rank) {
  return liveness_.lock()->break_up({code, message, reason, rank});
}

Status Execution::fail_without_memory() {
  try {
    return fail(Code::kInternal, "rank " + std::to_string(settings_.rank) + " has no memory for " + here());
  } catch (const std::bad_alloc&) {  // not even for the message
    return liveness_.lock()->break_up({Code::kInternal, "no memory"});
  }
}

}  // namespace tfring
