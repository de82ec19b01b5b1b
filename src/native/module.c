/* The module pybk._native: the digests of batches, their bytes in records, entries as objects, their places in records,
   and the commit of one entry, for pybk/ledger/digest.py, pybk/ledger/entry.py, pybk/storage/store_reader.py and
   pybk/storage/format/log_file.py, which do the same without it; and the messages of wire_module.c, for
   pybk/transport/client_links.py and server.py; and the guard of guard.c, for pybk/threads/interrupts.py.

   Functions let the interpreter lock go while they compute digests over RELEASE_BYTES or more, and large batches are
   checked by several threads then. What they use then cannot go
   away: buffers are held, payloads are referred to, and results are seen by nobody else yet. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "digests.h"
#include "framing.h"
#include "guard.h"
#include "spread.h"
#include "wire_module.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "headers and digests are written for little-endian processors; on others pybk computes in Python"
#endif

#define RELEASE_BYTES (256 * 1024)
#define RELEASE_ENTRY_BYTES (8 * 1024) /* for an entry alone: a thread that appends has others beside it */

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
        match = lock == NULL ? digests_match(type, of->key.buf, entries, count)
                             : digests_match_spread(type, of->key.buf, entries, count, nbytes);
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

/* Note where the payloads of a tuple lie; return their bytes together, or -1 if one is not a bytes object. */
static int64_t find(PyObject *payloads, entry *entries)
{
    const Py_ssize_t count = PyTuple_Size(payloads);
    int64_t nbytes = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        char *payload;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(payloads, i), &payload, &size) < 0)
            return -1;
        entries[i] = (entry){NULL, (uint8_t *)payload, (size_t)size, NULL};
        nbytes += size;
    }
    return nbytes;
}

static void place_prefix(entry *of, uint8_t *at)
{
    of->header = at;
    of->digest = at + HEADER_BYTES;
}

/* Make a bytes object for the prefix of each entry, and put it into a list, at every `step`-th place after `from`. */
static int add_prefixes(PyObject *list, Py_ssize_t from, Py_ssize_t step, size_t digest, entry *entries, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *prefix = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER_BYTES + digest));
        if (prefix == NULL)
            return -1;
        PyList_SetItem(list, from + (Py_ssize_t)i * step, prefix);
        place_prefix(&entries[i], (uint8_t *)PyBytes_AsString(prefix));
    }
    return 0;
}

static void write_headers(const headers *of, const entry *entries, size_t count)
{
    uint64_t length = of->length;
    for (size_t i = 0; i < count; i++) {
        length += entries[i].payload_bytes;
        const uint64_t header[4] = {big_endian(of->ledger_id), big_endian(of->first + i), big_endian(of->lac),
                                    big_endian(length)};
        memcpy(entries[i].digest - HEADER_BYTES, header, sizeof header);
    }
}

static PyObject *make(int type, const Py_buffer *key, const headers *of, PyObject *payloads, entry *entries)
{
    const size_t count = (size_t)PyTuple_Size(payloads);
    const int64_t nbytes = find(payloads, entries);
    PyObject *prefixes = nbytes < 0 ? NULL : PyList_New((Py_ssize_t)count);
    if (prefixes == NULL)
        return NULL;
    if (add_prefixes(prefixes, 0, 1, digest_bytes(type), entries, count) < 0) {
        Py_DECREF(prefixes);
        return NULL;
    }
    write_headers(of, entries, count);
    PyThreadState *lock = nbytes >= RELEASE_BYTES ? PyEval_SaveThread() : NULL;
    make_digests(type, key->buf, entries, count);
    if (lock != NULL)
        PyEval_RestoreThread(lock);
    return prefixes;
}

/* Return a place for each of some payloads; NULL with an exception if there is no memory. */
static entry *entries_for(PyObject *payloads)
{
    const size_t count = (size_t)PyTuple_Size(payloads);
    entry *entries = PyMem_Malloc((count ? count : 1) * sizeof(entry));
    if (entries == NULL)
        PyErr_NoMemory();
    return entries;
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
        entry *entries = entries_for(payloads);
        if (entries != NULL)
            made = make(type, &key, &of, payloads, entries);
        PyMem_Free(entries);
        Py_DECREF(payloads);
    }
    PyBuffer_Release(&key);
    return made;
}

/* ---- encode -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(encode_doc,
             "encode(type, key, ledger_id, first_entry_id, lac, length_before, payloads, head, copies)\n--\n\n"
             "Encode consecutive entries after some bytes, with their digests and a checksum of all.\n\n"
             "Args:\n"
             "    type: A digest type in TYPES.\n"
             "    key: 32 bytes for HMAC_SHA256; ignored by others.\n"
             "    ledger_id: The ledger.\n"
             "    first_entry_id: Id of the first entry.\n"
             "    lac: The last add confirmed, the same for all.\n"
             "    length_before: Payload bytes of the ledger before the first entry.\n"
             "    payloads: A sequence of bytes objects.\n"
             "    head: A bytes object, which comes before the entries.\n"
             "    copies: Whether to copy all into one bytes object.\n\n"
             "Returns:\n"
             "    A list of bytes objects, and the XXH3-64 of their bytes: one that has all, or the head, and then prefix and\n"
             "    payload of each entry.\n");

/* Return a list of one bytes object: the head, and space for the entries after it. */
static PyObject *in_one(PyObject *head, int64_t payload_bytes, size_t digest, entry *entries, size_t count)
{
    const size_t prefix = HEADER_BYTES + digest, head_bytes = (size_t)PyBytes_Size(head);
    PyObject *list = PyList_New(1);
    PyObject *body = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(head_bytes + count * prefix) + payload_bytes);
    if (list == NULL || body == NULL) {
        Py_XDECREF(list);
        Py_XDECREF(body);
        return NULL;
    }
    PyList_SetItem(list, 0, body);
    uint8_t *at = (uint8_t *)PyBytes_AsString(body);
    memcpy(at, PyBytes_AsString(head), head_bytes);
    at += head_bytes;
    for (size_t i = 0; i < count; i++) {
        place_prefix(&entries[i], at);
        at += prefix + entries[i].payload_bytes;
    }
    return list;
}

/* Return a list of the head, and a new prefix and the payload of each entry. */
static PyObject *in_many(PyObject *head, PyObject *payloads, size_t digest, entry *entries, size_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)(1 + 2 * count));
    if (list == NULL)
        return NULL;
    PyList_SetItem(list, 0, Py_NewRef(head));
    for (size_t i = 0; i < count; i++)
        PyList_SetItem(list, (Py_ssize_t)(2 + 2 * i), Py_NewRef(PyTuple_GetItem(payloads, (Py_ssize_t)i)));
    if (add_prefixes(list, 1, 2, digest, entries, count) < 0)
        Py_CLEAR(list);
    return list;
}

static PyObject *encoded(int type, const Py_buffer *key, const headers *of, PyObject *payloads, PyObject *head, int copies,
                         entry *entries)
{
    const size_t count = (size_t)PyTuple_Size(payloads), digest = digest_bytes(type);
    const int64_t nbytes = find(payloads, entries);
    if (nbytes < 0)
        return NULL;
    PyObject *pieces = copies ? in_one(head, nbytes, digest, entries, count)
                              : in_many(head, payloads, digest, entries, count);
    if (pieces == NULL)
        return NULL;
    write_headers(of, entries, count);
    const uint8_t *before = (const uint8_t *)PyBytes_AsString(head);
    const size_t before_bytes = (size_t)PyBytes_Size(head);
    PyThreadState *lock = nbytes >= RELEASE_BYTES ? PyEval_SaveThread() : NULL;
    const uint64_t checksum = encode_entries(type, key->buf, entries, count, before, before_bytes, copies);
    if (lock != NULL)
        PyEval_RestoreThread(lock);
    return Py_BuildValue("(NK)", pieces, (unsigned long long)checksum);
}

static PyObject *encode(PyObject *module, PyObject *arguments)
{
    (void)module;
    int type, copies;
    Py_buffer key;
    long long ledger_id, first, lac, length;
    PyObject *given, *head;
    if (!PyArg_ParseTuple(arguments, "iy*LLLLOSp:encode", &type, &key, &ledger_id, &first, &lac, &length, &given, &head,
                          &copies))
        return NULL;
    PyObject *made = NULL;
    PyObject *payloads = is_known(type, &key) ? PySequence_Tuple(given) : NULL; /* nobody else changes a tuple */
    if (payloads != NULL) {
        const headers of = {(uint64_t)ledger_id, (uint64_t)first, (uint64_t)lac, (uint64_t)length};
        entry *entries = entries_for(payloads);
        if (entries != NULL)
            made = encoded(type, &key, &of, payloads, head, copies, entries);
        PyMem_Free(entries);
        Py_DECREF(payloads);
    }
    PyBuffer_Release(&key);
    return made;
}

/* ---- lengths ------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(lengths_doc,
             "lengths(payloads)\n--\n\n"
             "Return the sizes of bytes objects, int64 each; None if an object has another type.\n\n"
             "Args:\n"
             "    payloads: A sequence of objects.\n");

static PyObject *lengths(PyObject *module, PyObject *given)
{
    (void)module;
    PyObject *payloads = PySequence_Tuple(given);
    if (payloads == NULL)
        return NULL;
    const Py_ssize_t count = PyTuple_Size(payloads);
    PyObject *made = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(int64_t));
    char *into = made == NULL ? NULL : PyBytes_AsString(made);
    for (Py_ssize_t i = 0; i < count && made != NULL; i++) {
        PyObject *payload = PyTuple_GetItem(payloads, i);
        if (!PyBytes_CheckExact(payload)) {
            Py_DECREF(made);
            made = Py_NewRef(Py_None);
            break;
        }
        const int64_t size = PyBytes_Size(payload);
        memcpy(into + i * (Py_ssize_t)sizeof size, &size, sizeof size);
    }
    Py_DECREF(payloads);
    return made;
}

/* ---- open ---------------------------------------------------------------------------------------------------------- */

/* Return what tuple.__new__ makes of a named tuple, which it takes over.
 *
 * From CPython 3.14 on a tuple keeps its hash, and only the constructor says that it has none yet; one that was only
 * allocated has the hash 0. The constructor takes a fifth of the time of a read of the store, so older ones do without.
 */
static PyObject *constructed(PyObject *made)
{
    PyObject *arguments = PyTuple_Pack(1, made);
    PyObject *again = NULL;
    if (arguments != NULL)
        again = ((newfunc)PyType_GetSlot(&PyTuple_Type, Py_tp_new))(Py_TYPE(made), arguments, NULL);
    Py_XDECREF(arguments);
    Py_DECREF(made);
    return again;
}

/* Return an instance of a type of named tuples, as its own constructor makes it; takes over the payload. */
static PyObject *named(PyTypeObject *type, const uint8_t *header, PyObject *payload)
{
    enum { NUMBERS = HEADER_BYTES / sizeof(uint64_t), KEEPS_HASHES = 0x030E0000 };
    PyObject *items[NUMBERS + 1] = {[NUMBERS] = payload};
    int failed = 0;
    for (size_t i = 0; i < NUMBERS; i++) {
        uint64_t number;
        memcpy(&number, header + i * sizeof number, sizeof number);
        items[i] = PyLong_FromLongLong((int64_t)__builtin_bswap64(number));
        failed |= items[i] == NULL;
    }
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *made = failed ? NULL : allocate(type, NUMBERS + 1);
    for (size_t i = 0; i <= NUMBERS; i++)
        if (made != NULL)
            PyTuple_SetItem(made, (Py_ssize_t)i, items[i]);
        else
            Py_XDECREF(items[i]);
    return made != NULL && Py_Version >= KEEPS_HASHES ? constructed(made) : made;
}

static int is_tuple_type(PyObject *type)
{
    if (PyType_Check(type) && PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type))
        return 1;
    PyErr_Format(PyExc_TypeError, "%R is not a type of named tuples", type);
    return 0;
}

/* Whether `count` arguments were given, those from `from` to `to` are numbers, and which. */
static int numbers_of(PyObject *const *given, Py_ssize_t count, Py_ssize_t wanted, Py_ssize_t from, int64_t *into)
{
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "takes %zd arguments, not %zd", wanted, count);
        return 0;
    }
    for (Py_ssize_t i = from; i < count; i++) {
        into[i - from] = PyLong_AsLongLong(given[i]);
        if (into[i - from] == -1 && PyErr_Occurred())
            return 0;
    }
    return 1;
}

/* Whether an entry's place has room for header and digest, and lies in the buffer. */
static int is_inside(int64_t start, int64_t end, size_t prefix, const Py_buffer *bytes)
{
    return start >= 0 && end <= bytes->len && start <= end && end - start >= (int64_t)prefix;
}

PyDoc_STRVAR(open_doc,
             "open(entry_type, key, buffer, type, ledger_id, entry_id, start, end)\n--\n\n"
             "Copy an encoded entry out of a buffer and verify the copy.\n\n"
             "Args:\n"
             "    entry_type: The named tuple to return.\n"
             "    key: 32 bytes for HMAC_SHA256; ignored by others.\n"
             "    buffer: Holds the entry.\n"
             "    type: A digest type in TYPES.\n"
             "    ledger_id: The ledger.\n"
             "    entry_id: The entry.\n"
             "    start: Where it starts in the buffer.\n"
             "    end: Where it ends.\n\n"
             "Returns:\n"
             "    The numbers of its header, and its payload; None if it lies outside, or its ids or its digest are others.\n");

static PyObject *verified(PyTypeObject *entry_type, const Py_buffer *key, const Py_buffer *bytes, const int64_t *numbers)
{
    const int type = (int)numbers[0];
    const int64_t start = numbers[3], end = numbers[4];
    const size_t digest = digest_bytes(type), prefix = HEADER_BYTES + digest;
    if (!is_inside(start, end, prefix, bytes))
        Py_RETURN_NONE;
    uint8_t copied[HEADER_BYTES + DIGEST_BYTES_MAX];
    memcpy(copied, (const uint8_t *)bytes->buf + start, prefix);
    const uint64_t ids[2] = {big_endian((uint64_t)numbers[1]), big_endian((uint64_t)numbers[2])};
    if (memcmp(copied, ids, sizeof ids) != 0)
        Py_RETURN_NONE;
    const Py_ssize_t size = (Py_ssize_t)(end - start) - (Py_ssize_t)prefix;
    PyObject *payload = PyBytes_FromStringAndSize((const char *)bytes->buf + start + prefix, size);
    if (payload == NULL)
        return NULL;
    const entry one = {copied, (const uint8_t *)PyBytes_AsString(payload), (size_t)size, copied + HEADER_BYTES};
    PyThreadState *lock = size >= RELEASE_BYTES ? PyEval_SaveThread() : NULL;
    const int match = digests_match(type, key->buf, &one, 1);
    if (lock != NULL)
        PyEval_RestoreThread(lock);
    if (match)
        return named(entry_type, copied, payload);
    Py_DECREF(payload);
    Py_RETURN_NONE;
}

static PyObject *open_entry(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    int64_t numbers[5];
    Py_buffer key, bytes;
    if (!numbers_of(given, count, 8, 3, numbers) || !is_tuple_type(given[0]) ||
        PyObject_GetBuffer(given[1], &key, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = NULL;
    if (PyObject_GetBuffer(given[2], &bytes, PyBUF_SIMPLE) == 0) {
        if (is_known((int)numbers[0], &key))
            found = verified((PyTypeObject *)given[0], &key, &bytes, numbers);
        PyBuffer_Release(&bytes);
    }
    PyBuffer_Release(&key);
    return found;
}

/* ---- span ---------------------------------------------------------------------------------------------------------- */

#define RECORD_HEADER_BYTES 64

/* The words of a run, as docs/reference/format.md has them in the index. */
static int words_of(PyObject *given, uint64_t words[4])
{
    for (Py_ssize_t i = 0; i < 4; i++) {
        PyObject *word = PyTuple_GetItem(given, i);
        const long long number = word == NULL ? -1 : PyLong_AsLongLong(word);
        if (number == -1 && PyErr_Occurred())
            return 0;
        words[i] = (uint64_t)number;
    }
    return 1;
}

/* Whether a plain record in the file has the entry, and from where to where. */
static int is_found(const uint64_t words[4], uint64_t entry_id, const Py_buffer *file, const Py_buffer *table,
                    uint64_t into[2])
{
    const uint64_t count = words[1] & 0xFFFFFFFF, stride = words[1] >> 32 ? words[1] >> 32 : 1;
    const uint64_t start = (words[2] & 0xFFFFFFFF) + RECORD_HEADER_BYTES, end = start + words[3];
    const uint64_t number = (entry_id - words[0]) / stride, base = start + 4 * count;
    if (words[3] >> 32 || end > (uint64_t)file->len || entry_id < words[0])
        return 0;
    into[0] = start;
    into[1] = end;
    if (count <= 1)
        return 1;
    if (base > end || number >= count || (table->buf != NULL && (uint64_t)table->len != 4 * count))
        return 0;
    const uint8_t *ends = table->buf != NULL ? table->buf : (const uint8_t *)file->buf + start;
    uint32_t low = 0, high;
    if (number > 0)
        memcpy(&low, ends + 4 * (number - 1), sizeof low);
    memcpy(&high, ends + 4 * number, sizeof high);
    into[0] = base + low;
    into[1] = base + high < end ? base + high : end;
    return into[0] <= into[1];
}

PyDoc_STRVAR(span_doc,
             "span(file, table, words, entry_id)\n--\n\n"
             "Return where an entry of a record starts and ends in the file.\n\n"
             "Args:\n"
             "    file: The bytes of the file.\n"
             "    table: A copy of the record's table; None to look at the one in the file.\n"
             "    words: The four words of the run.\n"
             "    entry_id: The entry.\n\n"
             "Returns:\n"
             "    Start and end.\n\n"
             "Raises:\n"
             "    ValueError: The record is compressed, or the run, the file or the table does not have the entry.\n");

static PyObject *span(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    int64_t entry_id;
    uint64_t words[4];
    Py_buffer file, table = {.buf = NULL};
    if (!numbers_of(given, count, 4, 3, &entry_id) || !words_of(given[2], words) ||
        PyObject_GetBuffer(given[0], &file, PyBUF_SIMPLE) < 0)
        return NULL;
    PyObject *found = NULL;
    if (given[1] == Py_None || PyObject_GetBuffer(given[1], &table, PyBUF_SIMPLE) == 0) {
        uint64_t at[2];
        if (is_found(words, (uint64_t)entry_id, &file, &table, at))
            found = Py_BuildValue("(KK)", (unsigned long long)at[0], (unsigned long long)at[1]);
        else
            PyErr_Format(PyExc_ValueError, "entry %lld does not lie in the run and the file", (long long)entry_id);
        PyBuffer_Release(&table);
    }
    PyBuffer_Release(&file);
    return found;
}

/* ---- decode -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(decode_doc,
             "decode(entry_type, buffer, prefix_bytes, start, end)\n--\n\n"
             "Return the named tuple of an encoded entry that was verified: the numbers of its header, and its payload.\n\n"
             "Args:\n"
             "    entry_type: The named tuple to return.\n"
             "    buffer: Holds the entry.\n"
             "    prefix_bytes: Bytes of its header and digest.\n"
             "    start: Where it starts in the buffer.\n"
             "    end: Where it ends.\n");

static PyObject *decode(PyObject *module, PyObject *const *given, Py_ssize_t count)
{
    (void)module;
    int64_t numbers[3];
    Py_buffer bytes;
    if (!numbers_of(given, count, 5, 2, numbers) || !is_tuple_type(given[0]) ||
        PyObject_GetBuffer(given[1], &bytes, PyBUF_SIMPLE) < 0)
        return NULL;
    const int64_t prefix = numbers[0], start = numbers[1], end = numbers[2];
    PyObject *made = NULL;
    if (prefix < HEADER_BYTES || !is_inside(start, end, (size_t)prefix, &bytes)) {
        PyErr_Format(PyExc_ValueError, "an entry from %lld to %lld with a prefix of %lld bytes does not lie in %zd bytes",
                     (long long)start, (long long)end, (long long)prefix, bytes.len);
    } else {
        const uint8_t *at = (const uint8_t *)bytes.buf + start;
        PyObject *payload = PyBytes_FromStringAndSize((const char *)at + prefix, (Py_ssize_t)(end - start - prefix));
        if (payload != NULL)
            made = named((PyTypeObject *)given[0], at, payload);
    }
    PyBuffer_Release(&bytes);
    return made;
}

/* ---- prefix -------------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(prefix_doc,
             "prefix(type, key, ledger_id, entry_id, lac, length, payload)\n--\n\n"
             "Return header and digest of one entry.\n\n"
             "Args:\n"
             "    type: A digest type in TYPES.\n"
             "    key: 32 bytes for HMAC_SHA256; ignored by others.\n"
             "    ledger_id: The ledger.\n"
             "    entry_id: The entry.\n"
             "    lac: The last add confirmed.\n"
             "    length: Payload bytes of the ledger up to and including this entry.\n"
             "    payload: Bytes of any kind.\n");

static PyObject *made_for(int type, const Py_buffer *key, const uint64_t header[4], const Py_buffer *payload)
{
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(HEADER_BYTES + digest_bytes(type)));
    if (made == NULL)
        return NULL;
    uint8_t *bytes = (uint8_t *)PyBytes_AsString(made);
    memcpy(bytes, header, HEADER_BYTES);
    const entry of = {bytes, payload->buf, (size_t)payload->len, bytes + HEADER_BYTES};
    PyThreadState *lock = payload->len >= RELEASE_ENTRY_BYTES ? PyEval_SaveThread() : NULL;
    make_digests(type, key->buf, &of, 1);
    if (lock != NULL)
        PyEval_RestoreThread(lock);
    return made;
}

static PyObject *prefix(PyObject *module, PyObject *arguments)
{
    (void)module;
    int type;
    Py_buffer key, payload;
    long long ledger_id, entry_id, lac, length;
    if (!PyArg_ParseTuple(arguments, "iy*LLLLy*:prefix", &type, &key, &ledger_id, &entry_id, &lac, &length, &payload))
        return NULL;
    const uint64_t header[4] = {big_endian(ledger_id), big_endian(entry_id), big_endian(lac), big_endian(length)};
    PyObject *made = is_known(type, &key) ? made_for(type, &key, header, &payload) : NULL;
    PyBuffer_Release(&key);
    PyBuffer_Release(&payload);
    return made;
}

/* ---- entry_commit -------------------------------------------------------------------------------------------------- */

PyDoc_STRVAR(entry_commit_doc,
             "entry_commit(ledger_id, entry_id, lsn, file_id, prefix, payload)\n--\n\n"
             "Return the bytes of a commit that has one entry and nothing else, with its padding.\n\n"
             "Args:\n"
             "    ledger_id: The ledger.\n"
             "    entry_id: The entry.\n"
             "    lsn: LSN of the commit.\n"
             "    file_id: The log file that it is written to.\n"
             "    prefix: The first bytes of the entry.\n"
             "    payload: The others.\n");

static PyObject *framed(const place *at, const Py_buffer *prefix, const Py_buffer *payload)
{
    const size_t size = (size_t)prefix->len + (size_t)payload->len;
    if (size > COMMIT_ENTRY_BYTES_MAX) {
        PyErr_Format(PyExc_ValueError, "an entry of %zu bytes does not fit a record", size);
        return NULL;
    }
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)entry_commit_bytes(size));
    if (made == NULL)
        return NULL;
    uint8_t *bytes = (uint8_t *)PyBytes_AsString(made);
    memcpy(bytes + COMMIT_ENTRY_AT, prefix->buf, (size_t)prefix->len);
    memcpy(bytes + COMMIT_ENTRY_AT + prefix->len, payload->buf, (size_t)payload->len);
    frame_entry(bytes, size, at);
    return made;
}

static PyObject *entry_commit(PyObject *module, PyObject *arguments)
{
    (void)module;
    long long ledger_id, entry_id, lsn, file_id;
    Py_buffer prefix, payload;
    if (!PyArg_ParseTuple(arguments, "LLLLy*y*:entry_commit", &ledger_id, &entry_id, &lsn, &file_id, &prefix, &payload))
        return NULL;
    const place at = {ledger_id, entry_id, lsn, file_id};
    PyObject *made = framed(&at, &prefix, &payload);
    PyBuffer_Release(&prefix);
    PyBuffer_Release(&payload);
    return made;
}

/* ---- the module ---------------------------------------------------------------------------------------------------- */

/* Add a set of the digest types for which `is_there`. */
static int add_types(PyObject *module, const char *name, int (*is_there)(int type))
{
    const int types[] = {DIGEST_CRC32C, DIGEST_NONE, DIGEST_HMAC_SHA256, DIGEST_XXH3};
    PyObject *known = PyFrozenSet_New(NULL);
    if (known == NULL)
        return -1;
    int failed = 0;
    for (size_t i = 0; i < sizeof types / sizeof *types && !failed; i++) {
        if (!is_there(types[i]))
            continue;
        PyObject *type = PyLong_FromLong(types[i]);
        failed = type == NULL || PySet_Add(known, type) < 0;
        Py_XDECREF(type);
    }
    failed = failed || PyModule_AddObjectRef(module, name, known) < 0;
    Py_DECREF(known);
    return failed ? -1 : 0;
}

static int set_up(PyObject *module)
{
    if (set_up_guard(module) < 0 || add_types(module, "TYPES", digests_are_there) < 0)
        return -1;
    return add_types(module, "ALONE", digests_are_there_alone);
}

static PyMethodDef METHODS[] = {
    {"checkpoint", checkpoint, METH_NOARGS, checkpoint_doc},
    {"decode", (PyCFunction)(void (*)(void))decode, METH_FASTCALL, decode_doc},
    {"encode", encode, METH_VARARGS, encode_doc},
    {"entry_commit", entry_commit, METH_VARARGS, entry_commit_doc},
    {"guarded", (PyCFunction)(void (*)(void))guarded, METH_FASTCALL, guarded_doc},
    {"is_guarded", is_guarded, METH_NOARGS, is_guarded_doc},
    {"lengths", lengths, METH_O, lengths_doc},
    {"make_answer", (PyCFunction)(void (*)(void))make_answer, METH_FASTCALL, make_answer_doc},
    {"make_read", (PyCFunction)(void (*)(void))make_read, METH_FASTCALL, make_read_doc},
    {"matches", matches, METH_VARARGS, matches_doc},
    {"open", (PyCFunction)(void (*)(void))open_entry, METH_FASTCALL, open_doc},
    {"prefix", prefix, METH_VARARGS, prefix_doc},
    {"prefixes", prefixes, METH_VARARGS, prefixes_doc},
    {"span", (PyCFunction)(void (*)(void))span, METH_FASTCALL, span_doc},
    {"take_add", (PyCFunction)(void (*)(void))take_add, METH_FASTCALL, take_add_doc},
    {"take_read", (PyCFunction)(void (*)(void))take_read, METH_FASTCALL, take_read_doc},
    {"take_reply", (PyCFunction)(void (*)(void))take_reply, METH_FASTCALL, take_reply_doc},
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
    .m_doc = "The digests of entries; TYPES are the digest types that this processor computes here, and ALONE those of "
             "them that it computes for one entry as fast as others do. "
             "And the commit of one entry, the messages of an add and a read of one, and calls that signals do not interrupt.",
    .m_size = sizeof(guard_state),
    .m_methods = METHODS,
    .m_slots = SLOTS,
    .m_traverse = traverse_guard,
    .m_clear = clear_guard,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
