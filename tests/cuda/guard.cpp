// A CUDA that computes nothing: with it, FakeTensorMode takes tensors of device "cuda" on a CPU build of torch.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct NoGuard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

}  // namespace

extern "C" void pretend_cuda() {
  auto& guard = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  if (guard.load() == nullptr) {
    guard.store(new NoGuard());
  }
}
