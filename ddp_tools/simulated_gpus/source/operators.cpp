// Runs each of torch's CUDA operators on the CPU, over the very bytes of the GPU's tensors.
//
// `import torch` loads this (see build.py). It replaces all operators that are registered for CUDA,
// whatever they are called, and keeps each original: where tensors or a generator are of different
// devices, the original is asked first, and refuses them in PyTorch's own words.
#include "simulated.h"  // before torch's, whose own way to CUDA's headers build.py closes

#include <ATen/Context.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using c10::OperatorHandle;
using c10::Stack;

template <class See>
void each_tensor(const IValue& value, const See& see) {
  if (value.isTensor() && value.toTensor().defined()) see(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& t : value.toTensorVector()) if (t.defined()) see(t);
  if (value.isOptionalTensorList())
    for (const auto& t : value.toOptionalTensorVector()) if (t && t->defined()) see(*t);
}

template <class Change>
IValue change_tensors(const IValue& value, const Change& change) {
  const auto safely = [&](const Tensor& t) { return t.defined() ? change(t) : t; };
  if (value.isTensor()) return safely(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : value.toTensorVector()) list.push_back(safely(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& t : value.toOptionalTensorVector())
      list.push_back(t ? std::optional<Tensor>(safely(*t)) : std::nullopt);
    return list;
  }
  return value;
}

Tensor dense(const Tensor& given) {
  const Tensor t = given.resolve_conj().resolve_neg();
  return t.is_non_overlapping_and_dense() ? t : t.contiguous();
}

// The tensors of one call: each of the GPU's with one of the CPU that has the same bytes.
class Loans {
 public:
  Tensor lend(const Tensor& ours) {
    if (!ours.is_cuda()) return ours;
    for (const auto& [known, lent] : pairs_) if (known.is_same(ours)) return lent;
    auto cpu = at::detail::make_tensor<c10::TensorImpl>(
        lend_storage(ours), c10::DispatchKeySet(c10::DispatchKey::CPU), ours.dtype());
    auto* impl = cpu.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(ours.sizes(), ours.strides(), ours.storage_offset());
    if (ours.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    impl->_set_conj(ours.is_conj());
    impl->_set_neg(ours.is_neg());
    pairs_.emplace_back(ours, cpu);
    return cpu;
  }

  // An operator may have made a tensor that it writes to larger: the CPU's bytes are then new.
  void follow_resizes() {
    for (const auto& [ours, cpu] : pairs_) {
      auto* mine = ours.storage().unsafeGetStorageImpl();
      auto* its = cpu.storage().unsafeGetStorageImpl();
      if (its->data() != mine->data()) {
        c10::DeviceGuard guard(ours.device());
        auto bytes = mine->allocator()->allocate(its->nbytes());
        if (its->nbytes()) std::memcpy(bytes.get(), its->data(), its->nbytes());
        mine->set_data_ptr_noswap(std::move(bytes));
        mine->set_nbytes(its->nbytes());
        its->set_data_ptr_noswap({mine->mutable_data(), c10::Device(c10::kCPU)});
      }
      if (ours.sizes() == cpu.sizes() && ours.strides() == cpu.strides()) continue;
      auto* impl = ours.unsafeGetTensorImpl();
      impl->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  bool has(const Tensor& ours) const {
    return std::any_of(pairs_.begin(), pairs_.end(),
                       [&](const auto& pair) { return pair.first.is_same(ours); });
  }

  // What the operator has returned, as a tensor of the GPU.
  Tensor bring_home(const Tensor& cpu, c10::Device device) const {
    for (const auto& [ours, lent] : pairs_) if (lent.is_same(cpu)) return ours;
    TORCH_CHECK(cpu.layout() == c10::kStrided, "simulated GPU: it has no sparse tensors");
    const Tensor whole = dense(cpu);
    const auto options = whole.options().device(device);
    Tensor ours = at::empty_strided(whole.sizes(), whole.strides(), options);
    if (whole.numel()) std::memcpy(ours.mutable_data_ptr(), whole.const_data_ptr(), whole.nbytes());
    return ours;
  }

 private:
  c10::Storage lend_storage(const Tensor& ours) {
    auto* storage = ours.storage().unsafeGetStorageImpl();
    for (const auto& [known, lent] : pairs_)
      if (known.storage().unsafeGetStorageImpl() == storage) return lent.storage();
    return c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
        c10::DataPtr(storage->mutable_data(), c10::Device(c10::kCPU)), c10::GetCPUAllocator(),
        /*resizable=*/true);
  }

  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

// Runs with the numbers that come next in the GPU's generator, and leaves the CPU's as it was.
class Draw {
 public:
  explicit Draw(const std::optional<at::Generator>& given, c10::Device device) : guard_(lock()) {
    at::Generator gpu = given ? *given : at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> guard(gpu.mutex());
    auto* impl = gpu.unsafeGetGeneratorImpl();
    const uint64_t seed = impl->current_seed(), offset = impl->get_offset();
    impl->set_offset(offset + 4);  // a multiple of 4, as the generator wants it
    cpu_.set_current_seed(seed * 0x9E3779B97F4A7C15 + offset);  // spreads seeds that are near
  }
  ~Draw() { cpu_.set_state(before_); }

 private:
  static std::mutex& lock() {
    static auto& one = *new std::mutex;
    return one;
  }
  std::lock_guard<std::mutex> guard_;
  at::Generator cpu_ = at::globalContext().defaultGenerator(c10::kCPU);
  Tensor before_ = cpu_.get_state();
};

// A call of an operator, with arguments of the CPU.
struct Call {
  const OperatorHandle op;
  Stack arguments;
  std::optional<at::Generator> generator;
  c10::Device device;
  std::vector<void*> made;  // where each result lies on the GPU, if it is new there

  Stack compute() const {
    std::optional<Draw> draw;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) draw.emplace(generator, device);
    return run();
  }
  // While a graph is captured: what shapes the results will have. All else stays as it was.
  Stack foresee() const {
    std::vector<std::pair<Tensor, Tensor>> before;
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* alias = op.schema().arguments()[i].alias_info();
      const auto keep = [&](const Tensor& t) { before.emplace_back(t, t.clone()); };
      if (alias && alias->isWrite()) each_tensor(arguments[i], keep);
    }
    at::Generator cpu = at::globalContext().defaultGenerator(c10::kCPU);
    const Tensor state = cpu.get_state();
    Stack results = run();
    cpu.set_state(state);
    for (const auto& [written, was] : before)
      if (written.sizes() == was.sizes()) written.copy_(was);
    return results;
  }
  // At each launch of the graph.
  void play() const {
    auto next = made.begin();
    for (const IValue& value : compute())
      each_tensor(value, [&](const Tensor& t) {
        const Tensor whole = dense(t);
        if (void* to = *next++) std::memcpy(to, whole.const_data_ptr(), whole.nbytes());
      });
  }

 private:
  Stack run() const {
    Stack work = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &work);
    return work;
  }
};

class OnTheCPU : public c10::OperatorKernel {
 public:
  explicit OnTheCPU(c10::SafeKernelFunction original) : original_(std::move(original)) {}

  void operator()(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    const auto& arguments = op.schema().arguments();
    const Stack given(stack->end() - arguments.size(), stack->end());
    const bool copies = op.schema().name() == "aten::copy_";
    if (!copies && is_mixed(given)) ask_original(op, keys, given);
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU),
                                "simulated GPU: the CPU has no ", op.operator_name());
    const c10::Device device = device_of(given);
    const c10::DeviceGuard guard(device);  // whose default stream may be meant
    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
    const bool captured = simulated::captures(stream);
    if (captured && copies && is_mixed(given) && !given[2].toBool())
      C10_CUDA_CHECK(simulated::break_capture());  // the host would wait for it
    // A collective may still be writing what the operator reads. A copy can wait for it on the
    // stream: one is part of a gather, which would not come back to be seen by the watchdog.
    const simulated::Works before = captured ? simulated::Works() : simulated::pending(stream);
    const bool later = copies && !before.empty() && !is_mixed(given);
    if (!later) simulated::wait(before);
    Loans loans;
    Call call{op, {}, std::nullopt, device, {}};
    const auto lend = [&](const Tensor& t) {
      // A graph keeps a number of the CPU as it was, and copies what its memory will hold.
      return captured && !copies && !t.is_cuda() ? t.clone() : loans.lend(t);
    };
    for (const IValue& value : given) {
      if (value.isGenerator()) call.generator = value.toGenerator();
      if (value.isGenerator()) call.arguments.emplace_back();
      else if (value.isDevice()) call.arguments.emplace_back(c10::Device(c10::kCPU));
      else call.arguments.push_back(change_tensors(value, lend));
    }
    if (later) {
      simulated::enqueue(stream, [call] { call.compute(); });
      torch::jit::drop(*stack, arguments.size());
      stack->push_back(given[0]);
      return;
    }
    const Stack results = captured ? call.foresee() : call.compute();
    loans.follow_resizes();
    torch::jit::drop(*stack, arguments.size());
    const auto home = [&](const Tensor& cpu) {
      const Tensor ours = loans.bring_home(cpu, device);
      call.made.push_back(loans.has(ours) ? nullptr : ours.mutable_data_ptr());
      return ours;
    };
    for (const IValue& value : results) stack->push_back(change_tensors(value, home));
    if (captured) simulated::record([call = std::move(call)] { call.play(); });
  }

 private:
  // Numbers may be mixed with all; of anything else, the operator itself knows what it takes.
  static bool is_mixed(const Stack& given) {
    std::set<std::string> devices;
    for (const IValue& value : given) {
      if (value.isGenerator()) devices.insert(value.toGenerator().device().str());
      each_tensor(value, [&](const Tensor& t) {
        if (!t.unsafeGetTensorImpl()->is_wrapped_number()) devices.insert(t.device().str());
      });
    }
    return devices.size() > 1;
  }

  void ask_original(const OperatorHandle& op, c10::DispatchKeySet keys, Stack given) const {
    struct Asking {
      Asking() { *simulated_gpus_only_asks() = true; }
      ~Asking() { *simulated_gpus_only_asks() = false; }
    } asking;
    try {
      original_.callBoxed(op, keys, &given);
    } catch (const c10::AcceleratorError&) {  // it has come to its kernels: so it takes them
    }
  }

  static c10::Device device_of(const Stack& given) {
    std::optional<c10::Device> found;
    for (const IValue& value : given) {
      each_tensor(value, [&](const Tensor& t) { if (t.is_cuda() && !found) found = t.device(); });
      if (!found && value.isDevice() && value.toDevice().has_index()) found = value.toDevice();
    }
    return found ? *found : c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
  }

  const c10::SafeKernelFunction original_;
};

// Operators that run no kernel are torch's own: what only looks at memory, or asks for it.
bool runs_no_kernel(const OperatorHandle& op) {
  static const std::set<std::string> known = {
      "aten::empty",     "aten::empty_strided", "aten::set_",          "aten::resize_",
      "aten::is_set_to", "aten::record_stream", "aten::_local_scalar_dense",
      "aten::_efficientzerotensor", "aten::_fused_sdp_choice", "aten::_use_cudnn_ctc_loss",
      "aten::_use_miopen_ctc_loss"};
  const auto& returns = op.schema().returns();
  const bool is_view = !returns.empty() && returns[0].alias_info() &&
                       !returns[0].alias_info()->isWrite();
  return is_view || known.count(op.schema().name());
}

// Attention is computed by plain operators, unless there is no kernel that a GPU could take.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                         const std::optional<Tensor>& mask, double dropout, bool causal,
                         std::optional<double> scale, bool grouped) {
  const int64_t choice = at::_ops::_fused_sdp_choice::redispatch(
      c10::DispatchKeySet(c10::DispatchKey::CUDA), query, key, value, mask, dropout, causal, scale,
      grouped);
  const auto none = static_cast<int64_t>(at::SDPBackend::error);
  return choice == none ? none : static_cast<int64_t>(at::SDPBackend::math);
}

// To replace an operator is what torch warns of.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// At first all operators of torch; later what another library has brought since, as torchvision.
void replace_operators() {
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  static auto& seen = *new std::set<std::string>;
  const bool is_first = seen.empty();
  auto& dispatcher = c10::Dispatcher::singleton();
  auto names = dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  // These have no kernel for CUDA: they choose one by the device.
  for (const char* chooser : {"aten::convolution", "aten::convolution_backward", "aten::copy_"})
    names.push_back({chooser, ""});
  for (const auto& name : names) {
    const auto op = dispatcher.findSchema(name);
    if (!seen.insert(c10::toString(name)).second || !op || runs_no_kernel(*op)) continue;
    const std::string library_name(*name.getNamespace());
    if (is_first && library_name != "aten") continue;
    auto original = op->getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
    auto kernel = std::make_unique<OnTheCPU>(std::move(original));
    auto* library = new torch::Library(torch::Library::IMPL, library_name, c10::DispatchKey::CUDA,
                                       __FILE__, __LINE__);  // what it registers lives as long
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedKernel(
        c10::BoxedKernel::makeFromFunctor(std::move(kernel))));
  }
}

TORCH_LIBRARY(simulated_gpus, library) {
  library.def("replace_operators", replace_operators);
  replace_operators();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(choose_attention);
}

}  // namespace
