// What a graph was compiled for, found unchanged without being looked up again: the objects and
// dictionaries that torch's guards go through to a model's attributes and weights.
//
// While a dictionary is as it was (dictionary_changes.h), what it held is there and alive. So what is
// pinned is asked in the order in which it was reached, each only after what holds it; nothing is kept
// alive by us. No Python code runs in here, so no other thread changes anything meanwhile.

#include "dictionary_changes.h"
#include "python_objects.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <vector>

#if KD_DICTIONARIES_TELL

namespace kd {
namespace {

// Bits of what to pin of a place. As `class Pin` in kernel_dispatch/pin_plan.py.
enum : long {
  kObject = 1,       // its class, and which dictionary holds its attributes
  kAttributes = 2,   // that dictionary
  kDictionary = 4,   // itself
  kType = 8,         // its class, with all that this has
  kTensor = 16,      // its class and attributes, and what TENSOR_MATCH asks for
  kAlone = 32,       // a tensor that no argument may be
};

PyObject* attributes_of(PyObject* object) {
  PyObject** const place = _PyObject_GetDictPtr(object);
  return place == nullptr ? nullptr : *place;
}

// 0: none now.
unsigned version_of(const PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030D0000  // the flag has no meaning since
  if ((type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) == 0) return 0;
#endif
  return type->tp_version_tag;
}

// What TENSOR_MATCH of torch asks of a tensor.
struct Form {
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::Device device;
  bool requires_grad;
  c10::SmallVector<int64_t, 8> sizes_and_strides;

  explicit Form(const at::Tensor& tensor)
      : keys(tensor.key_set()), type(tensor.dtype()), device(tensor.device()),
        requires_grad(tensor.requires_grad()) {
    sizes_and_strides.append(tensor.sizes().begin(), tensor.sizes().end());
    sizes_and_strides.append(tensor.strides().begin(), tensor.strides().end());
  }

  bool is_of(const at::Tensor& tensor) const {
    if (!tensor.defined() || tensor.key_set() != keys || tensor.dtype() != type) return false;
    if (tensor.device() != device || tensor.requires_grad() != requires_grad) return false;
    const at::IntArrayRef all(sizes_and_strides), sizes = all.slice(0, all.size() / 2);
    return tensor.sizes() == sizes && tensor.strides() == all.slice(sizes.size());
  }
};

struct Pin {
  enum class Kind { object, dictionary, type, tensor } kind;
  PyObject* object;
  PyTypeObject* type = nullptr;    // of an object or a tensor
  PyObject* attributes = nullptr;  // of the same
  uint64_t version = 0;            // of a dictionary: when; of a tensor: of its attributes
  int64_t form = -1;
};

// An argument of the compiled code, or a global variable of it: where the way to all others begins.
struct Start {
  Owned name;
  PyObject* object;
  Owned globals;  // where it is a variable of them

  PyObject* now(PyObject* arguments) const {
    return PyDict_GetItem(globals.object != nullptr ? globals.object : arguments, name.object);
  }
};

// Everything as it was at one moment.
class Pins {
 public:
  // Whether it holds now.
  bool hold(PyObject* arguments, const std::vector<Owned>& others) const {
    if (dictionaries_.one_changed()) return false;
    const auto now = c10::impl::tls_local_dispatch_key_set();
    if (now.included_ != keys_.included_ || now.excluded_ != keys_.excluded_) return false;
    for (const Start& start : starts_)
      if (start.now(arguments) != start.object) return false;
    for (const Owned& name : others)
      if (std::binary_search(alone_.begin(), alone_.end(), PyDict_GetItem(arguments, name.object)))
        return false;
    for (const Pin& pin : pins_)
      if (!holds(pin)) return false;
    return true;
  }

  void start(const Owned& name, PyObject* object, PyObject* globals) {
    starts_.push_back({name, object, Owned(globals)});
  }

  // Whether it could be pinned.
  bool add(PyObject* object, long what) {
    if (what & (kObject | kAttributes)) pins_.push_back(of_object(object));
    if (what & kAttributes) {
      PyObject* const attributes = attributes_of(object);
      if (attributes == nullptr) return false;  // with 3.10, of an object that never had any
      pins_.push_back(of_dictionary(attributes));
    }
    if (what & kDictionary) pins_.push_back(of_dictionary(object));
    if (what & kType) {
      const unsigned version = version_of(Py_TYPE(object));
      if (version == 0) return false;
      Pin pin{Pin::Kind::type, reinterpret_cast<PyObject*>(Py_TYPE(object))};
      pin.version = version;
      pins_.push_back(pin);
    }
    if (what & kAlone) alone_.push_back(object);
    return !(what & kTensor) || add_tensor(object);
  }

  void ready() { std::sort(alone_.begin(), alone_.end()); }

 private:
  static Pin of_object(PyObject* object) {
    return {Pin::Kind::object, object, Py_TYPE(object), attributes_of(object)};
  }
  Pin of_dictionary(PyObject* dictionary) {
    Pin pin{Pin::Kind::dictionary, dictionary};
    pin.version = dictionaries_.add(dictionary);
    return pin;
  }

  bool add_tensor(PyObject* object) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_nested() ||
        tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
      return false;
    Pin pin = of_object(object);
    pin.kind = Pin::Kind::tensor;
    if (pin.attributes != nullptr) pin.version = dictionaries_.add(pin.attributes);
    pin.form = static_cast<int64_t>(forms_.size());
    forms_.emplace_back(tensor);
    pins_.push_back(pin);
    return true;
  }

  bool holds(const Pin& pin) const {
    switch (pin.kind) {
      case Pin::Kind::object:
        return is_the_object(pin);
      case Pin::Kind::dictionary:
        return Dictionaries::is_as_at(pin.object, pin.version);
      case Pin::Kind::type:
        return version_of(reinterpret_cast<PyTypeObject*>(pin.object)) == pin.version;
      case Pin::Kind::tensor:
        return is_the_object(pin) &&
               (pin.attributes == nullptr || Dictionaries::is_as_at(pin.attributes, pin.version)) &&
               forms_[pin.form].is_of(THPVariable_Unpack(pin.object));
    }
    return false;
  }
  static bool is_the_object(const Pin& pin) {
    return Py_TYPE(pin.object) == pin.type && attributes_of(pin.object) == pin.attributes;
  }

  Dictionaries dictionaries_;
  std::vector<Start> starts_;
  std::vector<Pin> pins_;
  std::vector<Form> forms_;
  std::vector<PyObject*> alone_;  // sorted
  c10::impl::LocalDispatchKeySet keys_ = c10::impl::tls_local_dispatch_key_set();
};

// A place as it is found again: an attribute or an entry of one that comes before it.
struct Step {
  Py_ssize_t holder;  // -1: an argument, or a global variable
  Owned key;
  bool is_item;  // of a dictionary or tuple, not an attribute
  const PyTypeObject* type;
  long what;
  unsigned version = 0;  // of the type, where that has to be what it was: kType

  bool is_of(PyObject* value) const {
    if (value == nullptr || Py_TYPE(value) != type) return false;
    return version == 0 || version_of(type) == version;
  }
};

PyObject* entry_of(PyObject* holder, PyObject* key) {
  if (PyDict_Check(holder)) return PyDict_GetItem(holder, key);
  if (!PyTuple_CheckExact(holder) || !PyLong_CheckExact(key)) return nullptr;
  const Py_ssize_t index = PyLong_AsSsize_t(key);
  return index >= 0 && index < PyTuple_GET_SIZE(holder) ? PyTuple_GET_ITEM(holder, index) : nullptr;
}

struct Plan {
  std::vector<Step> steps;
  Owned globals;
  std::vector<Owned> others;  // names of arguments that may be no tensor of the model's

  // Nothing where a place is not there, or of another type.
  std::unique_ptr<Pins> pin(PyObject* arguments) const {
    auto made = std::make_unique<Pins>();
    std::vector<PyObject*> values;
    for (const Step& step : steps) {
      PyObject* const value = step.holder < 0 ? begin(step, arguments, *made)
                                              : part_of(values[step.holder], step);
      if (!step.is_of(value) || !made->add(value, step.what)) return nullptr;
      values.push_back(value);
    }
    made->ready();
    return made;
  }

 private:
  PyObject* begin(const Step& step, PyObject* arguments, Pins& made) const {
    PyObject* const given = PyDict_GetItem(arguments, step.key.object);
    PyObject* const value =
        given != nullptr ? given : PyDict_GetItem(globals.object, step.key.object);
    if (value != nullptr) made.start(step.key, value, given != nullptr ? nullptr : globals.object);
    return value;
  }
  static PyObject* part_of(PyObject* holder, const Step& step) {
    if (step.is_item) return entry_of(holder, step.key.object);
    PyObject* const attributes = attributes_of(holder);
    return attributes == nullptr ? nullptr : PyDict_GetItem(attributes, step.key.object);
  }
};

struct Planned {
  static constexpr const char* kName = "kernel_dispatch.plan";
  std::shared_ptr<const Plan> plan;
};

struct Held {
  static constexpr const char* kName = "kernel_dispatch.pins";
  std::shared_ptr<const Plan> plan;
  std::unique_ptr<Pins> pins;
};

PyObject* hold(PyObject* capsule, PyObject* arguments) {
  const auto* const held = inside<Held>(capsule);
  if (held == nullptr) return nullptr;
  return PyBool_FromLong(PyDict_Check(arguments) && held->pins->hold(arguments, held->plan->others));
}
PyMethodDef hold_method = {"hold", hold, METH_O, "Is all as it was when it was pinned?"};

PyObject* pin(PyObject* capsule, PyObject* arguments) {
  const auto* const planned = inside<Planned>(capsule);
  if (planned == nullptr) return nullptr;
  try {
    if (!PyDict_Check(arguments)) Py_RETURN_NONE;
    auto pins = planned->plan->pin(arguments);
    if (pins == nullptr) Py_RETURN_NONE;
    return function_with(Held{planned->plan, std::move(pins)}, &hold_method);
  } catch (const std::exception&) {  // a tensor that has no sizes
    Py_RETURN_NONE;
  }
}
PyMethodDef pin_method = {"pin", pin, METH_O, "What says whether all is as it is now."};

}  // namespace
}  // namespace kd

// steps: [(holder, key, is_item, type, what)], each behind its holder; others: names. Arguments ->
// what says of later arguments whether all is as it was; None where that can't be said.
extern "C" PyObject* kernel_dispatch_pin_plan(PyObject* steps, PyObject* globals, PyObject* others) {
  using namespace kd;
  if (!Dictionaries::tell()) Py_RETURN_NONE;
  Plan plan{{}, Owned(globals), {}};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(steps); i++) {
    PyObject* const each = PyList_GET_ITEM(steps, i);
    const auto field = [&](Py_ssize_t at) { return PyTuple_GET_ITEM(each, at); };
    Step step{PyLong_AsSsize_t(field(0)), Owned(field(1)), field(2) == Py_True,
              reinterpret_cast<PyTypeObject*>(field(3)), PyLong_AsLong(field(4))};
    if (step.what & kType) {
      step.version = version_of(step.type);
      if (step.version == 0) step.type = nullptr;  // of no value
    }
    plan.steps.push_back(std::move(step));
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); i++)
    plan.others.emplace_back(PyList_GET_ITEM(others, i));
  return function_with(Planned{std::make_shared<const Plan>(std::move(plan))}, &pin_method);
}

#else

extern "C" PyObject* kernel_dispatch_pin_plan(PyObject*, PyObject*, PyObject*) { Py_RETURN_NONE; }

#endif
