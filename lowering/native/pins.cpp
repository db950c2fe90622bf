// What a graph was compiled for, found unchanged without being looked up again: the objects and
// dictionaries that torch's guards go through to a model's attributes and weights.
//
// CPython gives a dictionary a new number with each change of it (3.10 to 3.12). While the number is
// the same, what it held is there and alive. So what is pinned is asked in the order in which it was
// reached, each only after what holds it; nothing is kept alive by us.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>
#include <vector>

#if PY_VERSION_HEX >= 0x030A0000 && PY_VERSION_HEX < 0x030D0000 && !defined(Py_GIL_DISABLED)

namespace {

// In the order of `class Pin` in kernel_dispatch/pin_plan.py.
enum class Kind : int { object = 0, dictionary = 1, type = 2, tensor = 3 };

PyObject* attributes_of(PyObject* object) {
  PyObject** const place = _PyObject_GetDictPtr(object);
  return place == nullptr ? nullptr : *place;
}

uint64_t version_of(PyObject* dictionary) {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dictionary)->ma_version_tag;
#pragma GCC diagnostic pop
}

// 0: none now.
unsigned version_of(PyTypeObject* type) {
  return (type->tp_flags & Py_TPFLAGS_VALID_VERSION_TAG) != 0 ? type->tp_version_tag : 0;
}

// What TENSOR_MATCH of torch asks of a tensor.
struct Form {
  c10::DispatchKeySet keys;
  caffe2::TypeMeta type;
  c10::Device device;
  bool requires_grad;
  std::vector<int64_t> sizes, strides;

  explicit Form(const at::Tensor& tensor)
      : keys(tensor.key_set()), type(tensor.dtype()), device(tensor.device()),
        requires_grad(tensor.requires_grad()), sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()) {}

  bool is_of(const at::Tensor& tensor) const {
    return tensor.defined() && tensor.key_set() == keys && tensor.dtype() == type &&
           tensor.device() == device && tensor.requires_grad() == requires_grad &&
           tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides);
  }
};

struct Pin {
  Kind kind;
  PyObject* object;
  PyTypeObject* type = nullptr;    // of an object or a tensor
  PyObject* attributes = nullptr;  // of the same
  uint64_t version = 0;            // of the attributes, where they are pinned with the object
  int64_t form = -1;
};

// An argument of the compiled code, or a global variable of it: where the way to all others begins.
struct Start {
  PyObject* name;
  PyObject* object;
  PyObject* globals;  // where it is a variable of them

  PyObject* now(PyObject* arguments) const {
    return PyDict_GetItem(globals != nullptr ? globals : arguments, name);
  }
};

struct Pins {
  std::vector<Start> starts;
  std::vector<Pin> pins;
  std::vector<Form> forms;
  std::vector<PyObject*> alone;   // tensors that no argument may be, sorted
  std::vector<PyObject*> others;  // names of the arguments that are asked
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();

  ~Pins() {
    for (const Start& start : starts) Py_DECREF(start.name), Py_XDECREF(start.globals);
    for (PyObject* name : others) Py_DECREF(name);
  }

  // Whether it could be pinned.
  bool add(Kind kind, PyObject* object) {
    Pin pin{kind, object};
    switch (kind) {
      case Kind::object:
        pin.type = Py_TYPE(object), pin.attributes = attributes_of(object);
        break;
      case Kind::dictionary:
        if (!PyDict_Check(object)) return false;
        pin.version = version_of(object);
        break;
      case Kind::type:
        if (!PyType_Check(object)) return false;
        pin.version = version_of(reinterpret_cast<PyTypeObject*>(object));
        if (pin.version == 0) return false;
        break;
      case Kind::tensor: {
        pin.type = Py_TYPE(object), pin.attributes = attributes_of(object);
        if (pin.attributes != nullptr) pin.version = version_of(pin.attributes);
        const at::Tensor& tensor = THPVariable_Unpack(object);
        if (!tensor.defined() || tensor.layout() != at::kStrided ||
            tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides())
          return false;
        pin.form = static_cast<int64_t>(forms.size());
        forms.emplace_back(tensor);
        break;
      }
    }
    pins.push_back(pin);
    return true;
  }

  bool holds(const Pin& pin) const {
    switch (pin.kind) {
      case Kind::object:
        return Py_TYPE(pin.object) == pin.type && attributes_of(pin.object) == pin.attributes;
      case Kind::dictionary:
        return version_of(pin.object) == pin.version;
      case Kind::type:
        return version_of(reinterpret_cast<PyTypeObject*>(pin.object)) == pin.version;
      case Kind::tensor:
        return Py_TYPE(pin.object) == pin.type && attributes_of(pin.object) == pin.attributes &&
               (pin.attributes == nullptr || version_of(pin.attributes) == pin.version) &&
               forms[pin.form].is_of(THPVariable_Unpack(pin.object));
    }
    return false;
  }

  bool hold(PyObject* arguments) const {
    const auto now = c10::impl::tls_local_dispatch_key_set();
    if (now.included_ != keys.included_ || now.excluded_ != keys.excluded_) return false;
    for (const Start& start : starts)
      if (start.now(arguments) != start.object) return false;
    for (PyObject* name : others)
      if (std::binary_search(alone.begin(), alone.end(), PyDict_GetItem(arguments, name)))
        return false;
    for (const Pin& pin : pins)
      if (!holds(pin)) return false;
    return true;
  }
};

constexpr const char* kName = "kernel_dispatch.pins";

PyObject* hold(PyObject* capsule, PyObject* arguments) {
  const auto* pins = static_cast<const Pins*>(PyCapsule_GetPointer(capsule, kName));
  if (pins == nullptr) return nullptr;
  return PyBool_FromLong(PyDict_Check(arguments) && pins->hold(arguments));
}

PyMethodDef hold_method = {"hold", hold, METH_O, "Is what was pinned as it was?"};

void forget(PyObject* capsule) { delete static_cast<Pins*>(PyCapsule_GetPointer(capsule, kName)); }

}  // namespace

// starts: [(name, object, globals or None)]; pins: [(kind, object)], each behind what it was reached through;
// alone: tensors; others: names. What says whether all of it is as it was, or None if it can't be asked.
extern "C" PyObject* kernel_dispatch_pin(PyObject* starts, PyObject* pins, PyObject* alone,
                                         PyObject* others) {
  auto made = std::make_unique<Pins>();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(starts); i++) {
    PyObject* const each = PyList_GET_ITEM(starts, i);
    PyObject* const name = PyTuple_GET_ITEM(each, 0);
    PyObject* const globals = PyTuple_GET_ITEM(each, 2) == Py_None ? nullptr : PyTuple_GET_ITEM(each, 2);
    Py_INCREF(name), Py_XINCREF(globals);
    made->starts.push_back({name, PyTuple_GET_ITEM(each, 1), globals});
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(pins); i++) {
    PyObject* const each = PyList_GET_ITEM(pins, i);
    const auto kind = static_cast<Kind>(PyLong_AsLong(PyTuple_GET_ITEM(each, 0)));
    if (!made->add(kind, PyTuple_GET_ITEM(each, 1))) Py_RETURN_NONE;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(alone); i++)
    made->alone.push_back(PyList_GET_ITEM(alone, i));
  std::sort(made->alone.begin(), made->alone.end());
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(others); i++) {
    PyObject* const name = PyList_GET_ITEM(others, i);
    Py_INCREF(name);
    made->others.push_back(name);
  }
  PyObject* const capsule = PyCapsule_New(made.get(), kName, forget);
  if (capsule == nullptr) return nullptr;
  made.release();
  PyObject* const method = PyCFunction_New(&hold_method, capsule);
  Py_DECREF(capsule);  // the method's now
  return method;
}

#else

extern "C" PyObject* kernel_dispatch_pin(PyObject*, PyObject*, PyObject*, PyObject*) {
  Py_RETURN_NONE;
}

#endif
