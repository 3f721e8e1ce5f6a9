// The border of the library: no exception crosses an entry point of the C interface.
#pragma once

#include <cxxabi.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "core.h"
#include "status.h"

namespace tfring {

// Allocates no memory.
inline void fill_text(char* to, size_t size, const char* from, size_t length) {
  length = std::min(length, size - 1);
  std::memcpy(to, from, length);
  to[length] = '\0';
}

inline int report(const Status& status, tfring_error* error) {
  error->code = static_cast<int32_t>(status.code);
  error->reason = static_cast<int32_t>(status.reason);
  error->rank = status.rank;
  error->other = status.other;
  error->ring = 0;
  fill_text(error->call, sizeof(error->call), status.call.data(), status.call.size());
  fill_text(error->message, sizeof(error->message), status.message.data(), status.message.size());
  return error->code;
}

inline Status status_of(const tfring_error& error) {
  return {static_cast<Code>(error.code), error.message, static_cast<Reason>(error.reason), error.rank,
          error.other};
}

// Calls `body`, and `otherwise` with a text for the exception that it threw. If Python ends a thread that
// waits for the GIL, the unwinding of the stack passes through: it is not an error and must not be stopped.
template <typename Body, typename Otherwise>
auto guard(Body body, Otherwise otherwise) -> decltype(body()) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    throw;
  } catch (const std::bad_alloc&) {
    return otherwise("no memory");
  } catch (const std::exception& error) {
    return otherwise(error.what());
  } catch (...) {
    return otherwise("an exception of an unknown kind");
  }
}

// For functions that fill an error and return its code or `failed`.
template <typename Result, typename Body>
Result at_border(tfring_error* error, Result failed, Body body) {
  return guard(body, [&](const char* what) {
    report(Status(), error);
    error->code = TFRING_INTERNAL;
    error->rank = error->other = -1;
    fill_text(error->message, sizeof(error->message), what, std::strlen(what));
    return failed;
  });
}
template <typename Body>
int at_border(tfring_error* error, Body body) {
  return at_border(error, static_cast<int>(TFRING_INTERNAL), body);
}
// For functions that return a number or nothing.
template <typename Body>
int at_border(int failed, Body body) {
  return guard(body, [&](const char*) { return failed; });
}
template <typename Body>
void at_border(Body body) {
  guard(body, [](const char*) {});
}

}  // namespace tfring
