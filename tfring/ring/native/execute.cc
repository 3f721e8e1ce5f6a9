// The execution of a plan: move bytes while any move.
//
// Each peer has a queue of sends and one of receives, which go on at their own pace. What is sent may be what
// another receive brings; then it follows byte by byte, so a large buffer streams round a ring, and adding
// one part overlaps the transfer of the next.
#include <algorithm>
#include <cstring>

#include "clock.h"
#include "kernels.h"
#include "process.h"
#include "trace.h"
#include "world.h"

namespace tfring {
namespace {

constexpr int64_t kSegmentBytes = 256 * 1024;  // moved one way before another gets its turn
constexpr int64_t kLargeBytes = 1024 * 1024;   // from here on a collective's time tells something
constexpr int kMovesToLookUp = 64;             // after this many, check for Ctrl-C
constexpr int kYields = 100;                   // where ranks outnumber the cores; they let each other run
constexpr int kMaxParts = 16;                  // of one call into a channel
constexpr int64_t kZeroBytes = 16 * 1024;
alignas(64) const char kZeros[kZeroBytes] = {};
constexpr int64_t kHeaderBytes = static_cast<int64_t>(sizeof(CallHeader));

}  // namespace

// Until every peer has said what it is about to do, until all is received, or until all is sent as well.
Status World::execute(Until until) {
  num_idle_ = 0;
  warned_ = false;
  if (caller_ == TFRING_TENSORFLOW_OP && op_interrupted()) return interruption();
  const bool large = plan_.spans.size() >= kLargeBytes;
  spins_ = 0;
  for (const Queue& queue : plan_.queues) {  // over TCP each look is a system call
    const bool shared = link_to(queue.rank)->own != nullptr;
    spins_ = std::max(spins_, shared ? num_spins_ : large ? 0 : num_spins_ / 10);
  }
  yields_ = num_spins_ > 0 ? 0 : kYields;
  int64_t start = 0;
  Status status;
  while (status.ok() && !done(until)) {
    bool moved = false;
    for (Queue& queue : plan_.queues) {
      if (queue.send >= 0) status = send_some(&queue, &moved);
      if (status.ok() && may_receive(queue)) status = receive_some(&queue, &moved);
      if (!status.ok()) break;
    }
    if (!status.ok()) break;
    if (moved) {
      num_idle_ = 0;
      warned_ = false;
      stand_still(false);
      if (++num_moves_ % kMovesToLookUp == 0) status = look_up(now_nanoseconds());
      if (large && start == 0 && plan_.queues[0].header_received) start = now_nanoseconds();
    } else {
      status = wait();
    }
  }
  stand_still(false);
  if (large && status.ok() && until == kDone) learn(start);
  return status;
}

// A ring tells each sender how long it took.
void World::learn(int64_t start) {
  Link* only = nullptr;
  for (const Queue& queue : plan_.queues) {
    if (!queue.greets) continue;
    if (only != nullptr) return;
    only = link_to(queue.rank);
  }
  if (only == nullptr || start == 0) return;
  only->sender->learn(seconds_between(start, now_nanoseconds()) / static_cast<double>(plan_.spans.size()));
}

bool World::done(Until until) const {
  if (plan_.num_recvs_left > 0 || (until == kDone && plan_.num_sends_left > 0)) return false;
  return std::all_of(plan_.queues.begin(), plan_.queues.end(),
                     [](const Queue& queue) { return queue.header_received || !queue.expects; });
}

// Bytes of the send under way that are there to be sent.
int64_t World::sendable(const Queue& queue) const {
  if (queue.send < 0) return 0;
  const Transfer& send = plan_.sends[static_cast<size_t>(queue.send)];
  if (send.after < 0) return send.wire_size() - send.moved;
  const Transfer& source = plan_.recvs[static_cast<size_t>(send.after)];
  return (source.over() ? send.wire_size() : std::min(send.range.size, source.moved)) - send.moved;
}

bool World::may_receive(const Queue& queue) const {
  if (!queue.header_received) return queue.expects;
  if (queue.recv < 0) return false;
  const Transfer& recv = plan_.recvs[static_cast<size_t>(queue.recv)];
  if (recv.after >= 0 && !plan_.sends[static_cast<size_t>(recv.after)].over()) return false;
  return receivable(recv) >= (recv.reduce && recv.range.size > 0 ? size_of(plan_.dtype) : 1);
}

// Bytes of a receive that there is use for.
int64_t World::receivable(const Transfer& recv) const {
  if (recv.onto < 0) return recv.wire_size() - recv.moved;
  const Transfer& below = plan_.recvs[static_cast<size_t>(recv.onto)];
  return (below.over() ? recv.wire_size() : std::min(recv.range.size, below.moved)) - recv.moved;
}

// Fewer bytes than this are of no use now.
int64_t World::least_receivable(const Queue& queue) const {
  if (!queue.header_received) return kHeaderBytes;
  return plan_.recvs[static_cast<size_t>(queue.recv)].reduce ? size_of(plan_.dtype) : 1;
}

Status World::send_some(Queue* queue, bool* moved) {
  iovec parts[kMaxParts];
  int num_parts = 0;
  const int64_t header_left = kHeaderBytes - queue->header_sent;
  if (header_left > 0) {
    parts[num_parts++] = {reinterpret_cast<char*>(&header_) + queue->header_sent,
                          static_cast<size_t>(header_left)};
  }
  Transfer& transfer = plan_.sends[static_cast<size_t>(queue->send)];
  int64_t left = std::min(sendable(*queue), kSegmentBytes);
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
  Link* link = link_to(queue->rank);
  const int64_t taken = link->sender->send(parts, num_parts);
  if (taken == kGone) return peer_gone(link);
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

Status World::receive_some(Queue* queue, bool* moved) {
  if (!queue->header_received) return receive_header(queue, moved);
  Transfer& transfer = plan_.recvs[static_cast<size_t>(queue->recv)];
  int64_t got = 0;
  TFRING_TRY(receive_bytes(transfer, link_to(queue->rank), &got));
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

Status World::receive_header(Queue* queue, bool* moved) {
  Link* link = link_to(queue->rank);
  CallHeader& theirs = link->their_header;
  const char* data = nullptr;
  const int64_t available = link->receiver->peek(kHeaderBytes, &data);
  if (available == kGone) return peer_gone(link);
  if (available < kHeaderBytes) return {};
  std::memcpy(&theirs, data, sizeof(theirs));
  link->receiver->consume(kHeaderBytes);
  statistics_.bytes_received += kHeaderBytes;
  queue->header_received = true;
  if (traced_) met(link->rank);
  *moved = true;
  if (agree(header_, theirs)) return {};
  const std::string who = "rank " + std::to_string(link->rank);
  const std::string me = "rank " + std::to_string(rank_);
  if (theirs.magic != kCallMagic || theirs.version != kProtocolVersion) {
    return fail(Code::kInternal, who + " sent " + me + " bytes that are no frame at " + here());
  }
  if (theirs.algorithm != header_.algorithm) {
    return fail(Code::kMismatch, "ranks disagree: " + who + " and " + me +
                                     " were told to use different algorithms. Set TFRING_ALGORITHM alike on "
                                     "all ranks");
  }
  return report_disagreement(link);
}

// Receives what is there of a transfer, at most a segment, and adds it or puts it in place.
Status World::receive_bytes(const Transfer& transfer, Link* link, int64_t* got) {
  Receiver* receiver = link->receiver.get();
  int64_t left = std::min(receivable(transfer), kSegmentBytes);
  int64_t position = transfer.range.begin + transfer.moved;
  if (transfer.range.size == 0 || transfer.reduce) {
    const int64_t item = transfer.reduce ? size_of(plan_.dtype) : 1;
    const char* wire = nullptr;
    *got = receiver->peek(transfer.range.size == 0 ? 1 : item, &wire);
    if (*got == kGone) return peer_gone(link);
    if (transfer.range.size == 0) {
      *got = std::min<int64_t>(*got, 1);
    } else {
      *got = left = std::min(*got, left) / item * item;
      const Stopwatch stopwatch(adding());
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
  return *got == kGone ? peer_gone(link) : Status();
}

}  // namespace tfring
