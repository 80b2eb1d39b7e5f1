/*
 * Keys, key files and the memory of secret keys.
 *
 * A file is checked by its descriptor, so nothing can change between the look and the read: it is a
 * regular file of this user's (or root's), closed to others; trusted_path.c checks the way to it.
 * New files are made with O_EXCL, so no link that another user put there is followed. A file that
 * takes the place of another is complete before it gets the name, and a secret that was replaced
 * stays until its public half is replaced, too.
 */
#include "trust/key.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/user.h"
#include "trust/trusted_path.h"

#define FILE_MOST    1024u /* bytes of a key file: comments are short */
#define TEXT_MOST    256u  /* of one that is written */
#define CHOSEN_BYTES (RFT_KEY_NAME_BYTES + 24)

static const char *const words[] = {[RFT_KEY_PUBLIC] = "public", [RFT_KEY_SECRET] = "secret"};
static const mode_t modes[] = {[RFT_KEY_PUBLIC] = 0644, [RFT_KEY_SECRET] = 0600};

/* ---- Text
 *
 * Z85 (ZeroMQ's RFC 32): four bytes, big end first, are five digits of base 85. Of five digits some
 * stand for more than four bytes hold; those are refused, so that a key has one text and no other.
 * A key is checked before it is written, so that there is no copy of a secret on the stack. */

static const char digits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                             ".-:+=^!/*?&<>()[]{}@%$#";

void rft_key_print(const rft_key *key, char text[RFT_KEY_TEXT])
{
    for (uint32_t i = 0; i < RFT_KEY_BYTES / 4; i++) {
        const unsigned char *at = key->bytes + (size_t)i * 4;
        uint32_t value =
            (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
        for (uint32_t digit = 5; digit > 0; digit--) {
            text[i * 5 + digit - 1] = digits[value % 85];
            value /= 85;
        }
    }
    text[RFT_KEY_CHARS] = '\0';
}

static bool group_parse(const char *text, unsigned char bytes[4])
{
    uint64_t value = 0;
    for (uint32_t i = 0; i < 5; i++) {
        const char *digit = text[i] == '\0' ? NULL : strchr(digits, text[i]);
        if (digit == NULL) return false;
        value = value * 85 + (uint64_t)(digit - digits);
    }
    for (uint32_t i = 0; i < 4; i++) {
        bytes[i] = (unsigned char)(value >> (24 - 8 * i));
    }
    return value <= UINT32_MAX;
}

bool rft_key_parse(const char *text, size_t count, rft_key *out)
{
    unsigned char group[4];
    bool good = count == RFT_KEY_CHARS;
    for (uint32_t i = 0; good && i < RFT_KEY_BYTES / 4; i++)
        good = group_parse(text + (size_t)i * 5, group);
    explicit_bzero(group, sizeof group);
    for (uint32_t i = 0; good && i < RFT_KEY_BYTES / 4; i++)
        (void)group_parse(text + (size_t)i * 5, out->bytes + (size_t)i * 4);
    return good;
}

/* ---- Memory for a secret: [ guard ][ secret … unused ][ guard ]. It does not come from the
 * allocator that the process installed, which may keep what it was given back. */

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* Whole pages. */
static size_t room_for(size_t bytes)
{
    size_t page = page_bytes();
    return (bytes + page - 1) / page * page;
}

/* A kernel that knows one of these words not is none that refit runs on. */
static void keep_from_others(void *secret, size_t room)
{
    (void)madvise(secret, room, MADV_DONTDUMP);
    (void)madvise(secret, room, MADV_DONTFORK);
    if (mlock(secret, room) == 0) return;
    rft_log(REFIT_LOG_INFO, "a secret key is not locked in memory, so it could be swapped out: %s",
            strerror(errno));
}

refit_status rft_secret_open(size_t bytes, void **out, refit_error *error)
{
    const size_t page = page_bytes(), room = room_for(bytes);
    void *whole =
        mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    unsigned char *secret = whole == MAP_FAILED ? NULL : (unsigned char *)whole + page;
    if (secret != NULL && mprotect(secret, room, PROT_READ | PROT_WRITE) != 0) {
        (void)munmap(whole, room + 2 * page);
        secret = NULL;
    }
    RFT_REFUSE_IF(secret == NULL, error, REFIT_ERR_HOST_MEMORY, "no memory for a secret key");
    keep_from_others(secret, room);
    *out = secret;
    return REFIT_OK;
}

void rft_secret_close(void *secret, size_t bytes)
{
    if (secret == NULL) return;
    const size_t page = page_bytes(), room = room_for(bytes);
    explicit_bzero(secret, room);
    (void)munmap((unsigned char *)secret - page, room + 2 * page);
}

const char *rft_key_suffix(rft_key_half half)
{
    return half == RFT_KEY_PUBLIC ? ".public" : ".secret";
}

/* ---- Reading */

static refit_status check_file(const struct stat *found, const char *path, refit_error *error)
{
    RFT_REFUSE_IF(!S_ISREG(found->st_mode), error, REFIT_ERR_SECURITY,
                  "key file %.120s is not a regular file", path);
    RFT_REFUSE_IF(!rft_user_is_own(found->st_uid) && found->st_uid != 0, error, REFIT_ERR_SECURITY,
                  "key file %.120s belongs to user %u, which could change it: own it (chown)%s",
                  path, (unsigned)found->st_uid, rft_user_doubt(found->st_uid));
    return REFIT_OK;
}

static refit_status check_mode(const struct stat *found, const char *path, rft_key_half half,
                               refit_error *error)
{
    RFT_REFUSE_IF(half == RFT_KEY_SECRET && (found->st_mode & 077) != 0, error, REFIT_ERR_SECURITY,
                  "secret key file %.100s has mode %04o, so others may read it: make a new pair "
                  "(refit keygen), or chmod 600 if no other user can have",
                  path, (unsigned)found->st_mode & 07777);
    RFT_REFUSE_IF((found->st_mode & 022) != 0, error, REFIT_ERR_SECURITY,
                  "key file %.120s has mode %04o, so others may change it: chmod 644", path,
                  (unsigned)found->st_mode & 07777);
    return REFIT_OK;
}

/* Ends the text with NUL. */
static refit_status read_all(int fd, const char *path, char text[FILE_MOST + 1], refit_error *error)
{
    size_t count = 0;
    ssize_t got = 1;
    while (got != 0 && count < FILE_MOST) {
        got = read(fd, text + count, FILE_MOST - count);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            return rft_fail_sub(error, REFIT_ERR_IO, errno, "key file %.120s cannot be read: %s",
                                path, strerror(errno));
        }
        count += (size_t)got;
    }
    text[count] = '\0';
    RFT_REFUSE_IF(count == FILE_MOST || strlen(text) != count, error, REFIT_ERR_CONFIG,
                  "%.120s is not a key file of refit: make one with refit keygen", path);
    return REFIT_OK;
}

/* The wrong file of the two; said before anything that would be wrong with the right one. */
static refit_status check_half(const char *text, const char *path, rft_key_half half,
                               refit_error *error)
{
    const char *other = words[half == RFT_KEY_PUBLIC ? RFT_KEY_SECRET : RFT_KEY_PUBLIC];
    char mark[32];
    size_t length = (size_t)snprintf(mark, sizeof mark, "\n# refit %s key", other);
    RFT_REFUSE_IF(strncmp(text, mark + 1, length - 1) == 0 || strstr(text, mark) != NULL, error,
                  REFIT_ERR_SECURITY, "%.120s holds a %s key: the %s one is wanted here (%s)", path,
                  other, words[half], rft_key_suffix(half));
    return REFIT_OK;
}

/* A line that is not a key may be a comment, '#' and a space (keys have no spaces), or blank. */
static refit_status read_line(const char *line, size_t length, const char *path, bool *found,
                              rft_key *out, refit_error *error)
{
    while (length > 0 && strchr(" \t\r", line[length - 1]) != NULL)
        length--;
    if (length == 0) return REFIT_OK;
    if (line[0] == '#' && (length == 1 || line[1] == ' ')) return REFIT_OK;
    RFT_REFUSE_IF(*found, error, REFIT_ERR_CONFIG, "key file %.120s has more than one key", path);
    RFT_REFUSE_IF(length != RFT_KEY_CHARS, error, REFIT_ERR_CONFIG,
                  "key file %.120s has a key of %zu characters instead of %u", path, length,
                  RFT_KEY_CHARS);
    *found = rft_key_parse(line, length, out);
    RFT_REFUSE_IF(!*found, error, REFIT_ERR_CONFIG,
                  "key file %.120s has a key with characters that Z85 does not have", path);
    return REFIT_OK;
}

static refit_status read_text(const char *text, const char *path, rft_key *out, refit_error *error)
{
    bool found = false;
    while (*text != '\0') {
        size_t length = strcspn(text, "\n");
        RFT_TRY(read_line(text, length, path, &found, out, error));
        text += length + (text[length] == '\n');
    }
    RFT_REFUSE_IF(!found, error, REFIT_ERR_CONFIG, "key file %.120s has no key in it", path);
    return REFIT_OK;
}

/* What an open file goes through. */
typedef struct read_room {
    char text[FILE_MOST + 1];
    rft_key key;
} read_room;

static refit_status read_opened(int fd, const char *path, rft_key_half half, read_room *room,
                                rft_key *out, refit_error *error)
{
    struct stat found;
    if (fstat(fd, &found) != 0) {
        int code = errno;
        return rft_fail_sub(error, REFIT_ERR_IO, code, "%s key file %.120s cannot be read: %s",
                            words[half], path, strerror(code));
    }
    refit_status status = check_file(&found, path, error);
    refit_status read_status = status == REFIT_OK ? read_all(fd, path, room->text, error) : status;
    if (read_status == REFIT_OK) status = check_half(room->text, path, half, error);
    if (status == REFIT_OK) status = check_mode(&found, path, half, error);
    if (status == REFIT_OK) status = read_status; /* what it said is in `error` still */
    if (status == REFIT_OK) status = read_text(room->text, path, &room->key, error);
    if (status == REFIT_OK) memcpy(out, &room->key, sizeof *out);
    return status;
}

static refit_status read_secret(int fd, const char *path, rft_key *out, refit_error *error)
{
    void *room = NULL;
    RFT_TRY(rft_secret_open(sizeof(read_room), &room, error));
    refit_status status = read_opened(fd, path, RFT_KEY_SECRET, room, out, error);
    rft_secret_close(room, sizeof(read_room));
    return status;
}

refit_status rft_key_file_read(int folder, const char *path, rft_key_half half, rft_key *out,
                               refit_error *error)
{
    char what[32];
    read_room room; /* of public keys, of which there may be many */
    int fd = -1;
    snprintf(what, sizeof what, "%s key file", words[half]);
    RFT_TRY(rft_trusted_open(folder, path, what, O_RDONLY | O_NONBLOCK | O_NOCTTY, &fd, error));
    refit_status status = half == RFT_KEY_SECRET ? read_secret(fd, path, out, error)
                                                 : read_opened(fd, path, half, &room, out, error);
    close(fd);
    return status;
}

/* ---- Writing */

bool rft_key_name_is_valid(const char *name)
{
    size_t length = strlen(name);
    return length > 0 && length < RFT_KEY_NAME_BYTES && name[0] != '.' && name[0] != '-' &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") ==
               length;
}

static bool write_all(int fd, const char *text, size_t count)
{
    while (count > 0) {
        ssize_t put = write(fd, text, count);
        if (put < 0 && errno != EINTR) return false;
        if (put < 0) continue;
        text += put;
        count -= (size_t)put;
    }
    return true;
}

static refit_status refuse_write(const char *file, int code, refit_error *error)
{
    RFT_REFUSE_IF(code == EEXIST, error, REFIT_ERR_EXISTS,
                  "key file %.120s is there already, and may be in use: choose another name, or "
                  "replace it",
                  file);
    return rft_fail_sub(error, REFIT_ERR_IO, code, "key file %.120s cannot be written: %s", file,
                        strerror(code));
}

/* A new file with its text, on the disk; on failure there is none. */
static refit_status write_new(int folder, const char *file, mode_t mode, const char *text,
                              refit_error *error)
{
    int fd = openat(folder, file, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
    if (fd < 0) return refuse_write(file, errno, error);
    bool done = fchmod(fd, mode) == 0 && write_all(fd, text, strlen(text)) && fsync(fd) == 0;
    int code = errno;
    if (close(fd) != 0 && done) {
        done = false;
        code = errno;
    }
    if (done) return REFIT_OK;
    (void)unlinkat(folder, file, 0);
    return refuse_write(file, code, error);
}

/* The names of one half: its own, the one under which it is made if it is to replace another, and
 * the one under which that other stays until both halves are replaced. */
typedef struct half_names {
    char final[CHOSEN_BYTES];
    char made[CHOSEN_BYTES + 8];
    char old[CHOSEN_BYTES + 8];
} half_names;

static half_names names_of(const char *name, rft_key_half half, bool replace)
{
    half_names names;
    snprintf(names.final, sizeof names.final, "%s%s", name, rft_key_suffix(half));
    snprintf(names.made, sizeof names.made, "%s%s%s", replace ? "." : "", names.final,
             replace ? ".new" : "");
    snprintf(names.old, sizeof names.old, ".%s.old", names.final);
    return names;
}

static refit_status make_half(int folder, const char *name, rft_key_half half, const rft_key *key,
                              bool replace, refit_error *error)
{
    void *room = NULL;
    half_names names = names_of(name, half, replace);
    RFT_TRY(rft_secret_open(TEXT_MOST, &room, error));
    char *text = room;
    int head = snprintf(text, TEXT_MOST, "# refit %s key of %s%s\n", words[half], name,
                        half == RFT_KEY_SECRET ? ": keep it" : "");
    rft_key_print(key, text + head);
    strcat(text, "\n");
    if (replace) (void)unlinkat(folder, names.made, 0); /* of a run that was killed */
    refit_status status = write_new(folder, names.made, modes[half], text, error);
    rft_secret_close(room, TEXT_MOST);
    return status;
}

static void drop_half(int folder, const char *name, rft_key_half half, bool replace)
{
    half_names names = names_of(name, half, replace);
    (void)unlinkat(folder, names.made, 0);
}

static refit_status name_half(int folder, const char *name, rft_key_half half, refit_error *error)
{
    half_names names = names_of(name, half, true);
    if (renameat(folder, names.made, folder, names.final) == 0) return REFIT_OK;
    return refuse_write(names.final, errno, error);
}

/* So that it can come back; `kept`: there is one. */
static refit_status keep_secret(int folder, const char *name, bool *kept, refit_error *error)
{
    half_names names = names_of(name, RFT_KEY_SECRET, true);
    (void)unlinkat(folder, names.old, 0); /* of a run that was killed */
    *kept = linkat(folder, names.final, folder, names.old, 0) == 0;
    return *kept || errno == ENOENT ? REFIT_OK : refuse_write(names.final, errno, error);
}

static void bring_secret_back(int folder, const char *name, bool kept)
{
    half_names names = names_of(name, RFT_KEY_SECRET, true);
    if (!kept)
        (void)unlinkat(folder, names.final, 0);
    else if (renameat(folder, names.old, folder, names.final) != 0)
        rft_log(REFIT_LOG_ERROR, "the secret key that was %.120s is in %.120s now: %s", names.final,
                names.old, strerror(errno));
}

/* Both new halves in the place of what is there; none if either cannot. */
static refit_status name_pair(int folder, const char *name, refit_error *error)
{
    bool kept;
    half_names secret = names_of(name, RFT_KEY_SECRET, true);
    RFT_TRY(keep_secret(folder, name, &kept, error));
    refit_status status = name_half(folder, name, RFT_KEY_SECRET, error);
    if (status == REFIT_OK) {
        status = name_half(folder, name, RFT_KEY_PUBLIC, error);
        if (status != REFIT_OK) {
            bring_secret_back(folder, name, kept);
            return status;
        }
    }
    if (kept) (void)unlinkat(folder, secret.old, 0);
    return status;
}

static refit_status write_pair(int folder, const char *name, const rft_key *public_key,
                               const rft_key *secret_key, bool replace, refit_error *error)
{
    refit_status status;
    RFT_TRY(make_half(folder, name, RFT_KEY_SECRET, secret_key, replace, error));
    RFT_TRY_GOTO(make_half(folder, name, RFT_KEY_PUBLIC, public_key, replace, error), undo_secret);
    if (!replace) return REFIT_OK;
    RFT_TRY_GOTO(name_pair(folder, name, error), undo_public);
    return REFIT_OK;

undo_public:
    drop_half(folder, name, RFT_KEY_PUBLIC, replace);
undo_secret:
    drop_half(folder, name, RFT_KEY_SECRET, replace);
    return status;
}

refit_status rft_key_files_write(const char *folder, const char *name, const rft_key *public_key,
                                 const rft_key *secret_key, bool replace, refit_error *error)
{
    RFT_REFUSE_IF(
        !rft_key_name_is_valid(name), error, REFIT_ERR_INVALID,
        "\"%.80s\" is not a name for keys: letters, digits, '.', '_' and '-', at most %d, "
        "beginning with a letter, a digit or '_'",
        name, RFT_KEY_NAME_BYTES - 1);
    bool made = mkdir(folder, 0700) == 0;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) {
        return rft_fail_sub(error, REFIT_ERR_IO, errno, "folder %.120s cannot be opened: %s",
                            folder, strerror(errno));
    }
    refit_status status = write_pair(fd, name, public_key, secret_key, replace, error);
    if (status == REFIT_OK) (void)fsync(fd);
    close(fd);
    if (status != REFIT_OK && made) (void)rmdir(folder);
    return status;
}
