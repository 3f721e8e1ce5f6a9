// TLS 1.3 over a data connection, by an OpenSSL that the process finds.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>

#include "status.h"

namespace tfring {

constexpr int kTlsKeyBytes = 32;

// One end of an encrypted connection. Belongs to the current call, as its Link does.
class Tls {
 public:
  // Agrees with the peer on the keys of this connection. Both prove that they know `key` (a pre-shared key,
  // with an ephemeral Diffie-Hellman exchange: recorded data stays secret if the key becomes known).
  // `library` is a file that has the functions of OpenSSL 3 or 1.1.1, or is linked to one that has them.
  static Status open(const char* library, int fd, bool accepts, const unsigned char* key, double seconds,
                     std::unique_ptr<Tls>* tls);
  virtual ~Tls() = default;

  // See Sender::send and Receiver::receive: they never block. Bytes count as sent once the kernel has them,
  // so that none are left in this object when a collective ends.
  virtual int64_t send(const iovec* parts, int num_parts) = 0;
  virtual int64_t receive(const iovec* parts, int num_parts) = 0;
};

}  // namespace tfring
