// Distinguishes ranks that wait for each other from those that wait for a slow one, by the peers' reports of
// their calls.
#include "calls.h"

#include <algorithm>

namespace tfring {

Calls::Calls(int rank, int world_size)
    : rank_(rank),
      counts_(static_cast<size_t>(world_size)),
      num_sent_(static_cast<size_t>(world_size)),
      num_received_(static_cast<size_t>(world_size)),
      in_call_(static_cast<size_t>(world_size)) {
  for (Past& past : past_) past.numbers.resize(static_cast<size_t>(world_size));
}

uint64_t Calls::count(Kind kind, int root, Group* group) {
  std::fill(in_call_.begin(), in_call_.end(), uint8_t{0});
  const auto count_with = [this](int rank) {
    if (rank == rank_) return;
    in_call_[static_cast<size_t>(rank)] = 1;
    ++counts_[static_cast<size_t>(rank)];
  };
  if (is_pairwise(kind)) {
    const int peer = group->rank_of(root);
    count_with(peer);
    return ++(kind == Kind::kSend ? num_sent_ : num_received_)[static_cast<size_t>(peer)];
  }
  for (int rank : group->ranks) count_with(rank);
  return ++group->sequence;
}

void Calls::begin(const CallHeader& header) {
  header_ = header;
  ++num_calls_;
  num_chain_ = 0;
  is_running_ = true;
  if (is_pairwise(static_cast<Kind>(header.kind))) return;
  Past& past = past_[num_past_++ % past_.size()];  // for ranks that ask for it after it is over
  past.header = header;
  for (size_t r = 0; r < in_call_.size(); ++r) {
    past.numbers[r] = in_call_[r] != 0 ? num_collectives(static_cast<int>(r)) : 0;
  }
}

// Returns the number of collectives that this rank has begun together with that one.
uint64_t Calls::num_collectives(int rank) const {
  const size_t r = static_cast<size_t>(rank);
  return counts_[r] - num_sent_[r] - num_received_[r];
}

uint64_t Calls::asked_number(int rank) const {
  const bool is_with_it = is_running_ && takes_part(rank) && !is_pairwise(static_cast<Kind>(header_.kind));
  return is_with_it ? num_collectives(rank) : 0;
}

void Calls::tell(int rank, uint64_t asked, Pong* pong) const {
  const size_t r = static_cast<size_t>(rank);
  pong->is_running = is_running_ ? 1 : 0;
  pong->is_with_you = takes_part(rank) ? 1 : 0;
  pong->call = num_calls_;
  pong->num_sent = num_sent_[r];
  pong->num_received = num_received_[r];
  pong->header = header_;
  for (const Past& past : past_) {
    if (asked == 0 || past.numbers[r] != asked) continue;
    pong->past = past.header;
    pong->past_number = asked;
  }
  pong->num_chain = is_running_ ? num_chain_ : 0;
  std::copy_n(chain_, pong->num_chain, pong->chain);
}

// Returns whether the peer has begun its part of the current call, according to its report.
bool Calls::has_begun(int rank, const Report& report) const {
  const size_t r = static_cast<size_t>(rank);
  const Kind kind = static_cast<Kind>(header_.kind);
  if (kind == Kind::kSend) return report.pong.num_received >= num_sent_[r];
  if (kind == Kind::kReceive) return report.pong.num_sent >= num_received_[r];
  return report.begun - report.pong.num_sent - report.pong.num_received >= num_collectives(rank);
}

// Returns the peer's call with this rank that differs from the current one; null if there is none. Both ranks
// count the calls they have begun together: collectives, sends and receives separately. So collectives with
// one number must agree, including one that the peer has finished. If one of the calls is a send or a
// receive, which need not be in step, neither rank has begun the other's call, nor can it.
const CallHeader* Calls::contradiction(int rank, const Report& report) const {
  const Pong& pong = report.pong;
  const uint64_t asked = asked_number(rank);
  if (asked != 0 && pong.past_number == asked && !agree(header_, pong.past)) return &pong.past;
  return is_in_another(rank, report) ? &pong.header : nullptr;
}

bool Calls::is_in_another(int rank, const Report& report) const {
  const Pong& pong = report.pong;
  if (pong.is_with_you == 0) return false;
  const size_t r = static_cast<size_t>(rank);
  const Kind mine = static_cast<Kind>(header_.kind);
  const Kind theirs = static_cast<Kind>(pong.header.kind);
  const uint64_t my_number = num_collectives(rank);
  const uint64_t their_number = report.begun - pong.num_sent - pong.num_received;
  if (!is_pairwise(mine) && !is_pairwise(theirs)) {
    return my_number == their_number && !agree(header_, pong.header);
  }
  if (pong.is_running == 0 || has_begun(rank, report)) return false;
  if (theirs == Kind::kReceive) return pong.num_received > num_sent_[r];
  if (theirs == Kind::kSend) return pong.stands_still != 0 && pong.num_sent > num_received_[r];
  return their_number > my_number;
}

// A peer that has not begun this rank's call is in another call, and cannot begin this one before. Ranks that
// wait for each other in a row like this are reported from one to the next. A row that returns to this rank's
// call never ends, and is returned as a text. A peer in the same call waits for the same rank as this one.
std::string Calls::follow(int rank, const Report& report) {
  const Pong& pong = report.pong;
  if (pong.is_running == 0) return {};
  uint32_t length = 0;
  decltype(Pong::chain) chain;
  if (!has_begun(rank, report)) {
    chain[length++] = {rank, static_cast<uint32_t>(pong.call)};
  } else if (pong.is_with_you == 0 || is_pairwise(static_cast<Kind>(header_.kind)) ||
             !agree(header_, pong.header)) {
    return {};
  }
  for (uint32_t i = 0; i < pong.num_chain && length < kMostChain; ++i) chain[length++] = pong.chain[i];
  if (length == 0) return {};
  std::copy_n(chain, length, chain_);
  num_chain_ = length;
  const auto end = chain + length;
  const auto mine = std::find_if(chain, end, [this](const auto& one) { return one.rank == rank_; });
  if (mine == end || mine == chain) return {};
  if (mine->call != static_cast<uint32_t>(num_calls_)) {  // belongs to a call that is over
    num_chain_ = 0;
    return {};
  }
  std::string row = "rank " + std::to_string(rank_) + " waits for";
  for (const auto* one = chain; one != mine; ++one) {
    const std::string next = " rank " + std::to_string(one->rank);
    row += next + "," + next + " for";
  }
  return row + " rank " + std::to_string(rank_);
}

}  // namespace tfring
