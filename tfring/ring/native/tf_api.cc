// Looks TensorFlow's C API up in the libraries already loaded.
#include "tf_api.h"

#include <dlfcn.h>

namespace tfring {

TfApi tf{};

std::string load_tf_api() {
  // Wheels spread the C API over these two; which symbol is where changes between releases.
  void* libraries[] = {dlopen("libtensorflow_framework.so.2", RTLD_LAZY | RTLD_NOLOAD),
                       dlopen("libtensorflow_cc.so.2", RTLD_LAZY | RTLD_NOLOAD)};
  if (libraries[0] == nullptr && libraries[1] == nullptr) return "TensorFlow is not loaded in this process";
  const auto find = [&](const char* name) -> void* {
    for (void* library : libraries) {
      void* symbol = library == nullptr ? nullptr : dlsym(library, name);
      if (symbol != nullptr) return symbol;
    }
    return nullptr;
  };
#define TFRING_LOOK_UP(result, name, arguments)                       \
  tf.name = reinterpret_cast<result(*) arguments>(find(#name));       \
  if (tf.name == nullptr) {                                           \
    return "this TensorFlow does not have the C API function " #name; \
  }
  TFRING_TF_SYMBOLS(TFRING_LOOK_UP)
#undef TFRING_LOOK_UP
  return {};
}

}  // namespace tfring
