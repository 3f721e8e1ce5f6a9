// Links between this rank and others, which carry data.
#pragma once

#include <memory>
#include <vector>

#include "channel.h"
#include "core.h"
#include "fd.h"
#include "frame.h"
#include "status.h"
#include "tls.h"

namespace tfring {

// Carries data between this rank and one other, both ways; belongs to the call under way. What the two say of
// their calls goes over a connection apart from it (see liveness.h).
struct Link {
  // Takes over the descriptors of data.
  static Status open(const tfring_link& from, int this_rank, std::unique_ptr<Link>* link);

  int rank = -1;
  Fd data_fd;
  std::unique_ptr<Tls> tls;        // null where the data is not encrypted
  std::unique_ptr<Mailbox> own;    // the peer writes, this rank reads
  std::unique_ptr<Mailbox> peers;  // and the other way round
  std::unique_ptr<Sender> sender;
  std::unique_ptr<Receiver> receiver;
  CallHeader their_header{};
};

// One for each pair of ranks that exchanges anything. A call uses those that were there when it began; others
// may be added while it is under way.
class Links {
 public:
  explicit Links(int world_size) : links_(static_cast<size_t>(world_size)) {}

  Link* to(int rank) const { return links_[static_cast<size_t>(rank)].get(); }
  void add(std::unique_ptr<Link> link) { links_[static_cast<size_t>(link->rank)] = std::move(link); }
  void close();

 private:
  std::vector<std::unique_ptr<Link>> links_;  // [rank]; null where there is none
};

}  // namespace tfring
