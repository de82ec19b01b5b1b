/* The module pybk._native: the digests of batches, for pybk/digest.py, which does the same without it.

   Both functions let the interpreter lock go while they compute over RELEASE_BYTES or more. What they use then cannot go
   away: buffers are held, payloads are referred to, and results are seen by nobody else yet. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "digests.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "headers and digests are written for little-endian processors; on others pybk computes in Python"
#endif

#define RELEASE_BYTES (256 * 1024)

static uint64_t big_endian(uint64_t value) { return __builtin_bswap64(value); }

static int is_known(int type, const Py_buffer *key)
{
    if (!digests_are_there(type)) {
        PyErr_Format(PyExc_ValueError, "digest type %d is not computed here; see TYPES", type);
        return 0;
    }
    if (type == DIGEST_HMAC_SHA256 && key->len != HMAC_KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "the key has %zd bytes; it takes %d", key->len, HMAC_KEY_BYTES);
        return 0;
    }
    return 1;
}

/* ---- matches ------------------------------------------------------------------------------------------------------- */

typedef struct {
    Py_buffer key, bytes, offsets, sizes, ids;
} checked;

/* A number of an array, which need not be aligned. */
static int64_t number_at(const Py_buffer *of, size_t i)
{
    int64_t number;
    memcpy(&number, (const char *)of->buf + i * sizeof number, sizeof number);
    return number;
}

/* Fill in the entries; return whether all lie in the buffer, and say which ledger and entries they are. */
static int locate(const checked *of, int64_t ledger_id, size_t digest, entry *entries, size_t count)
{
    const uint64_t ledger = big_endian((uint64_t)ledger_id);
    const int64_t least = (int64_t)(HEADER_BYTES + digest), end = of->bytes.len;
    for (size_t i = 0; i < count; i++) {
        const int64_t start = number_at(&of->offsets, i), size = number_at(&of->sizes, i);
        if (size < least || start < 0 || size > end || start > end - size)
            return 0;
        uint8_t *at = (uint8_t *)of->bytes.buf + start;
        uint64_t said[2];
        memcpy(said, at, sizeof said);
        if (said[0] != ledger || said[1] != big_endian((uint64_t)number_at(&of->ids, i)))
            return 0;
        entries[i] = (entry){at, at + least, (size_t)(size - least), at + HEADER_BYTES};
    }
    return 1;
}

static PyObject *compare(int type, const checked *of, int64_t ledger_id)
{
    const size_t count = (size_t)of->ids.len / sizeof(int64_t);
    if (of->offsets.len != of->ids.len || of->sizes.len != of->ids.len || of->ids.len % (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "offsets, sizes and ids are to be equally long arrays of int64");
        return NULL;
    }
    entry *entries = PyMem_Malloc((count ? count : 1) * sizeof(entry));
    if (entries == NULL)
        return PyErr_NoMemory();
    int match = locate(of, ledger_id, digest_bytes(type), entries, count);
    if (match) {
        size_t nbytes = 0;
        for (size_t i = 0; i < count; i++)
            nbytes += entries[i].payload_bytes;
        PyThreadState *lock = nbytes >= RELEASE_BYTES ? PyEval_SaveThread() : NULL;
        match = digests_match(type, of->key.buf, entries, count);
        if (lock != NULL)
            PyEval_RestoreThread(lock);
    }
    PyMem_Free(entries);
    return PyBool_FromLong(match);
}

PyDoc_STRVAR(matches_doc,
             "matches(type, key, ledger_id, buffer, offsets, sizes, ids)\n--\n\n"
             "Return whether each encoded entry lies in the buffer, has the ledger's id and its own, and its digest.\n\n"
             "Args:\n"
             "    type: A digest type in TYPES.\n"
             "    key: 32 bytes for HMAC_SHA256; ignored by others.\n"
             "    ledger_id: The ledger.\n"
             "    buffer: Holds the entries.\n"
             "    offsets: Where each begins, int64, contiguous.\n"
             "    sizes: The bytes of each, the same.\n"
             "    ids: The id of each, the same.\n");

static PyObject *matches(PyObject *module, PyObject *arguments)
{
    (void)module;
    int type;
    long long ledger_id;
    checked of;
    if (!PyArg_ParseTuple(arguments, "iy*Ly*y*y*y*:matches", &type, &of.key, &ledger_id, &of.bytes, &of.offsets,
                          &of.sizes, &of.ids))
        return NULL;
    PyObject *found = is_known(type, &of.key) ? compare(type, &of, ledger_id) : NULL;
    PyBuffer_Release(&of.key);
    PyBuffer_Release(&of.bytes);
    PyBuffer_Release(&of.offsets);
    PyBuffer_Release(&of.sizes);
    PyBuffer_Release(&of.ids);
    return found;
}

/* ---- prefixes ------------------------------------------------------------------------------------------------------ */

/* Without a sign, so that numbers beyond 63 bits, which no ledger has, are not undefined. */
typedef struct {
    uint64_t ledger_id, first, lac, length;
} headers;

/* Make a bytes object for each prefix, write the header into it, and note where payload and digest are. */
static int lay_out(PyObject *payloads, const headers *of, size_t digest, PyObject *prefixes, entry *entries)
{
    const Py_ssize_t count = PyTuple_Size(payloads);
    uint64_t length = of->length;
    for (Py_ssize_t i = 0; i < count; i++) {
        char *payload, *made;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(payloads, i), &payload, &size) < 0)
            return -1;
        PyObject *prefix = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER_BYTES + digest));
        if (prefix == NULL)
            return -1;
        PyList_SetItem(prefixes, i, prefix);
        made = PyBytes_AsString(prefix);
        length += (uint64_t)size;
        const uint64_t header[4] = {big_endian(of->ledger_id), big_endian(of->first + (uint64_t)i), big_endian(of->lac),
                                    big_endian(length)};
        memcpy(made, header, sizeof header);
        entries[i] = (entry){(uint8_t *)made, (uint8_t *)payload, (size_t)size, (uint8_t *)made + HEADER_BYTES};
    }
    return (length - of->length) >= RELEASE_BYTES;
}

static PyObject *make(int type, const Py_buffer *key, const headers *of, PyObject *payloads)
{
    const Py_ssize_t count = PyTuple_Size(payloads);
    PyObject *prefixes = PyList_New(count);
    if (prefixes == NULL)
        return NULL;
    entry *entries = PyMem_Malloc((count ? (size_t)count : 1) * sizeof(entry));
    if (entries == NULL) {
        Py_DECREF(prefixes);
        return PyErr_NoMemory();
    }
    int release = lay_out(payloads, of, digest_bytes(type), prefixes, entries);
    if (release >= 0) {
        PyThreadState *lock = release ? PyEval_SaveThread() : NULL;
        make_digests(type, key->buf, entries, (size_t)count);
        if (lock != NULL)
            PyEval_RestoreThread(lock);
    }
    PyMem_Free(entries);
    if (release < 0)
        Py_CLEAR(prefixes);
    return prefixes;
}

PyDoc_STRVAR(prefixes_doc,
             "prefixes(type, key, ledger_id, first_entry_id, lac, length_before, payloads)\n--\n\n"
             "Return header and digest of consecutive entries, a bytes object each.\n\n"
             "Args:\n"
             "    type: A digest type in TYPES.\n"
             "    key: 32 bytes for HMAC_SHA256; ignored by others.\n"
             "    ledger_id: The ledger.\n"
             "    first_entry_id: Id of the first entry.\n"
             "    lac: The last add confirmed, the same for all.\n"
             "    length_before: Payload bytes of the ledger before the first entry.\n"
             "    payloads: A sequence of bytes objects.\n");

static PyObject *prefixes(PyObject *module, PyObject *arguments)
{
    (void)module;
    int type;
    Py_buffer key;
    long long ledger_id, first, lac, length;
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "iy*LLLLO:prefixes", &type, &key, &ledger_id, &first, &lac, &length, &given))
        return NULL;
    PyObject *made = NULL;
    PyObject *payloads = is_known(type, &key) ? PySequence_Tuple(given) : NULL; /* nobody else changes a tuple */
    if (payloads != NULL) {
        const headers of = {(uint64_t)ledger_id, (uint64_t)first, (uint64_t)lac, (uint64_t)length};
        made = make(type, &key, &of, payloads);
        Py_DECREF(payloads);
    }
    PyBuffer_Release(&key);
    return made;
}

/* ---- the module ---------------------------------------------------------------------------------------------------- */

static int set_up(PyObject *module)
{
    const int types[] = {DIGEST_CRC32C, DIGEST_NONE, DIGEST_HMAC_SHA256, DIGEST_XXH3};
    PyObject *known = PyFrozenSet_New(NULL);
    if (known == NULL)
        return -1;
    int failed = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types && !failed; i++) {
        if (!digests_are_there(types[i]))
            continue;
        PyObject *type = PyLong_FromLong(types[i]);
        failed = type == NULL || PySet_Add(known, type) < 0;
        Py_XDECREF(type);
    }
    failed = failed || PyModule_AddObjectRef(module, "TYPES", known) < 0;
    Py_DECREF(known);
    return failed ? -1 : 0;
}

static PyMethodDef METHODS[] = {
    {"matches", matches, METH_VARARGS, matches_doc},
    {"prefixes", prefixes, METH_VARARGS, prefixes_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, set_up},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "pybk._native",
    .m_doc = "The digests of many entries at once; TYPES are the digest types that this processor computes here.",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
