/* The functions of the module pybk._native for the wire, and their docstrings. */

#ifndef PYBK_WIRE_MODULE_H
#define PYBK_WIRE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern const char make_read_doc[], take_read_doc[], make_answer_doc[], take_reply_doc[], take_add_doc[];

PyObject *make_read(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *take_read(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *make_answer(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *take_add(PyObject *module, PyObject *const *given, Py_ssize_t count);
PyObject *take_reply(PyObject *module, PyObject *const *given, Py_ssize_t count);

#endif
