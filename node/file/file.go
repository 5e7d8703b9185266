// SPDX-License-Identifier: Apache-2.0

// Package file serves the sandbox's files as its root user. Every path is hostile: whoever runs commands in the
// sandbox has prepared the tree.
//
// Names that are not UTF-8 are shown with %XX for each such byte, and such a name is understood where a path is
// expected. A name that is itself of that form is shown with %25 for each %; all others are shown as they are.
package file

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/account"
	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

const bodyMax = 16 << 20 // of JSON requests

// API answers for files and directories.
type API struct {
	env  map[string]string
	cwd  string
	uid  uint32 // whose the files are that it makes
	root bool   // it may give files away
}

// New makes the API. Paths are expanded with env and relative to cwd.
func New(env []string, cwd string) *API {
	a := &API{env: map[string]string{}, cwd: cwd, uid: uint32(os.Geteuid()), root: os.Geteuid() == 0}
	for _, pair := range env {
		name, value, _ := strings.Cut(pair, "=")
		a.env[name] = value
	}
	return a
}

func (a *API) lookup(name string) (string, bool) { v, ok := a.env[name]; return v, ok }

// Routes adds the file API.
func (a *API) Routes(mux *http.ServeMux) {
	for pattern, handle := range map[string]handler{
		"GET /files/info":         (*API).info,
		"DELETE /files":           (*API).remove,
		"POST /files/permissions": (*API).permissions,
		"POST /files/mv":          (*API).move,
		"GET /files/search":       (*API).search,
		"POST /files/replace":     (*API).replace,
		"POST /files/upload":      (*API).upload,
		"GET /files/download":     (*API).download,
		"PUT /files/content":      (*API).putContent,
		"HEAD /files/content":     (*API).headContent,
		"GET /files/tar":          (*API).pack,
		"POST /files/tar":         (*API).unpack,
		"GET /files/watch":        (*API).watch,
		"GET /directories/list":   (*API).list,
		"POST /directories":       (*API).makeDirectories,
		"DELETE /directories":     (*API).removeDirectories,
	} {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if err := handle(a, w, r); err != nil {
				reply.Error(w, r, err)
			}
		})
		method, path, _ := strings.Cut(pattern, " ")
		mux.HandleFunc(method+" "+identityPrefix+path, func(w http.ResponseWriter, r *http.Request) {
			if err := a.as(handle, w, r); err != nil {
				reply.Error(w, r, err)
			}
		})
	}
}

// handler answers one route. It is given the API because the same route is served under several identities.
type handler func(*API, http.ResponseWriter, *http.Request) error

// done answers a request that has nothing to say.
func done(w http.ResponseWriter) error {
	w.WriteHeader(http.StatusOK)
	return nil
}

func required(r *http.Request, name string) (string, error) {
	v := r.URL.Query().Get(name)
	if v == "" {
		return "", reply.Errorf(wire.CodeMissingQuery, "The query parameter %s is missing.", name)
	}
	return v, nil
}

func boolean(r *http.Request, name string, usual bool) (bool, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return usual, nil
	}
	v, err := strconv.ParseBool(text)
	if err != nil {
		return false, reply.Errorf(wire.CodeInvalidQuery, "%s must be true or false, not %q.", name, text)
	}
	return v, nil
}

func (a *API) info(w http.ResponseWriter, r *http.Request) error {
	out := map[string]wire.FileInfo{}
	book := account.Read()
	for _, given := range r.URL.Query()["path"] {
		p, err := a.locate(given, false)
		if err != nil {
			return err
		}
		info, err := describe(p.fd(), p.name, p.path, book)
		p.Close()
		if err != nil {
			return explain(given, err)
		}
		out[asGiven(given)] = info
	}
	reply.JSON(w, http.StatusOK, out)
	return nil
}

func (a *API) remove(w http.ResponseWriter, r *http.Request) error {
	paths := r.URL.Query()["path"]
	if len(paths) == 0 {
		return reply.Errorf(wire.CodeMissingQuery, "The query parameter path is missing.")
	}
	for i, given := range paths {
		if err := a.removeOne(given); err != nil {
			return partway(err, paths[:i])
		}
	}
	return done(w)
}

func (a *API) removeOne(given string) error {
	p, err := a.locate(given, false)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	err = unix.Unlinkat(p.fd(), p.name, 0)
	p.Close()
	switch {
	case err == nil || err == unix.ENOENT:
		return nil
	case err == unix.EISDIR || p.name == ".":
		return reply.Errorf(wire.CodeRuntimeError, "%s is a directory.", asGiven(given)).WithHint("Delete it with DELETE /directories.")
	}
	return explain(given, err)
}

// partway adds to the failure of one entry what has become of those before it: a request with several is not undone.
func partway(err error, before []string) error {
	var fault *reply.Fault
	if len(before) == 0 || !errors.As(err, &fault) {
		return err
	}
	const shown = 5
	var names []string
	for _, name := range before[:min(len(before), shown)] {
		names = append(names, shorten(asGiven(name)))
	}
	if len(before) > shown {
		names = append(names, "…")
	}
	told := *fault
	if told.Hint == "" {
		told.Hint = told.Code.Hint()
	}
	told.Hint = strings.TrimSpace(fmt.Sprintf("%s Of the entries of this request, %d before it are done (%s); those after it were not tried.",
		told.Hint, len(before), strings.Join(names, ", ")))
	return &told
}

func shorten(name string) string {
	if len(name) <= 100 {
		return name
	}
	return strings.ToValidUTF8(name[:100], "") + "…"
}

// missing is true for the fault that a path does not exist.
func missing(err error) bool {
	var f *reply.Fault
	return errors.As(err, &f) && f.Code == wire.CodeFileNotFound
}

func (a *API) permissions(w http.ResponseWriter, r *http.Request) error {
	return a.eachPermission(w, r, false, func(p *place, want attributes) error {
		if !p.exists() {
			return fs.ErrNotExist
		}
		return p.change(want)
	})
}

// eachPermission reads a body of paths with attributes and does the same to each, in order.
func (a *API) eachPermission(w http.ResponseWriter, r *http.Request, parents bool, do func(*place, attributes) error) error {
	var body map[string]wire.Permission
	if err := reply.Decode(w, r, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		return err
	}
	one := func(given string) error {
		want, err := wanted(body[given], wire.CodeInvalidRequestBody)
		if err != nil {
			return err
		}
		p, err := a.locate(given, parents)
		if err != nil {
			return err
		}
		defer p.Close()
		if err = do(p, want); err != nil {
			return explain(given, err)
		}
		return nil
	}
	paths := sortedKeys(body)
	for i, given := range paths {
		if err := one(given); err != nil {
			return partway(err, paths[:i])
		}
	}
	return done(w)
}

func wanted(p wire.Permission, code wire.Code) (attributes, error) {
	want := attributes{mode: -1, uid: -1, gid: -1}
	var err error
	if p.Mode != 0 {
		m, err := modeOf(p.Mode, code)
		if err != nil {
			return want, err
		}
		want.mode = int(m)
	}
	want.uid, want.gid, err = owners(p.Owner, p.Group, code)
	return want, err
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

func (a *API) move(w http.ResponseWriter, r *http.Request) error {
	var body []wire.Move
	if err := reply.Decode(w, r, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		return err
	}
	var moved []string
	for _, m := range body {
		if err := a.moveOne(r.Context(), m); err != nil {
			return partway(err, moved)
		}
		moved = append(moved, m.Src)
	}
	return done(w)
}

func (a *API) moveOne(ctx context.Context, m wire.Move) error {
	src, err := a.locate(m.Src, false)
	if err != nil {
		return err
	}
	defer src.Close()
	if !src.exists() {
		return explain(m.Src, fs.ErrNotExist)
	}
	dest, err := a.locate(m.Dest, true)
	if err != nil {
		return err
	}
	defer dest.Close()
	err = unix.Renameat2(src.fd(), src.name, dest.fd(), dest.name, unix.RENAME_NOREPLACE)
	if err == unix.EINVAL && src.name != "." && dest.name != "." && !dest.exists() {
		// Some filesystems cannot promise it; then it is only looked for.
		err = unix.Renameat(src.fd(), src.name, dest.fd(), dest.name)
	}
	if err == unix.EXDEV {
		// Another filesystem, or a directory of the image: overlays do not rename those.
		err = transfer(ctx, src, dest)
	}
	switch {
	case err == nil:
		return nil
	case err == unix.EEXIST:
		return reply.Errorf(wire.CodeRuntimeError, "%s exists already.", asGiven(m.Dest)).WithHint("Delete it first.")
	case err == unix.EINVAL:
		return reply.Errorf(wire.CodeRuntimeError, "%s cannot be moved to %s, which lies inside of it.", asGiven(m.Src), asGiven(m.Dest))
	}
	return explain(m.Src, err)
}

// search finds files by their name in a tree. The answer is written as it is found: a tree may be large.
func (a *API) search(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	glob := r.URL.Query().Get("pattern")
	if glob == "" {
		glob = "**"
	}
	p, err := compile(glob)
	if err != nil {
		return reply.Errorf(wire.CodeInvalidQuery, "pattern %q: %v.", glob, err)
	}
	root, err := a.locate(given, false)
	if err != nil {
		return err
	}
	defer root.Close()
	book := account.Read()
	info, err := describe(root.fd(), root.name, root.path, book)
	if err != nil {
		return explain(given, err)
	}
	if info.Type != wire.FileInfoTypeDirectory {
		found := []wire.FileInfo{}
		if p.match(root.name) {
			found = append(found, info)
		}
		reply.JSON(w, http.StatusOK, found)
		return nil
	}
	dir, err := openDir(root.fd(), root.name)
	if err != nil {
		return explain(given, err)
	}
	defer dir.Close()
	if err := safefile.CheckNotProc(int(dir.Fd())); err != nil {
		return explain(given, err)
	}
	out := newArray(w)
	defer out.close()
	paths := prefix{root.path}
	return out.finish(walk(r.Context(), dir, 1, func(at int, name string, level int, isDir bool) (bool, error) {
		full := paths.at(level, name, isDir)
		if isDir || !p.match(name) {
			return true, nil
		}
		if info, err := describe(at, name, full, book); err == nil {
			return true, out.add(info)
		}
		return true, nil
	}))
}

// list gives the entries of a directory, down to a depth, each directory before what is in it.
func (a *API) list(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	depth := 1
	if text := r.URL.Query().Get("depth"); text != "" {
		if depth, err = strconv.Atoi(text); err != nil || depth < 0 {
			return reply.Errorf(wire.CodeInvalidQuery, "depth must be a number from 0 up, not %q.", text)
		}
	}
	root, err := a.locate(given, false)
	if err != nil {
		return err
	}
	defer root.Close()
	book := account.Read()
	info, err := describe(root.fd(), root.name, root.path, book)
	if err != nil {
		return explain(given, err)
	}
	if info.Type != wire.FileInfoTypeDirectory {
		return reply.Errorf(wire.CodeInvalidFile, "%s is not a directory.", asGiven(given)).WithHint("Links are not followed here; give the directory itself.")
	}
	dir, err := openDir(root.fd(), root.name)
	if err != nil {
		return explain(given, err)
	}
	defer dir.Close()
	if err := safefile.CheckNotProc(int(dir.Fd())); err != nil {
		return explain(given, err)
	}
	out := newArray(w)
	defer out.close()
	if depth == 0 {
		return nil
	}
	paths := prefix{root.path}
	return out.finish(walk(r.Context(), dir, 1, func(at int, name string, level int, isDir bool) (bool, error) {
		info, err := describe(at, name, paths.at(level, name, isDir), book)
		if err != nil {
			return false, nil
		}
		return level < depth, out.add(info)
	}))
}

// prefix remembers the path of each directory that a walk is in, by level.
type prefix []string

// at gives the path of an entry, and remembers it if it is a directory.
func (p *prefix) at(level int, name string, isDir bool) string {
	dir := (*p)[level-1]
	if dir == "/" {
		dir = ""
	}
	full := dir + "/" + name
	if isDir {
		*p = append((*p)[:level], full)
	}
	return full
}

// array writes a JSON array piece by piece. Nothing goes out before the first piece, so that an early failure is an
// ordinary error.
type array struct {
	w     http.ResponseWriter
	buf   *bufio.Writer
	count int
	ended bool
}

func newArray(w http.ResponseWriter) *array {
	return &array{w: w, buf: bufio.NewWriterSize(w, 32<<10)}
}

func (a *array) add(v any) error {
	data, err := reply.Marshal(v)
	if err != nil {
		return err
	}
	if a.count == 0 {
		a.w.Header().Set("Content-Type", "application/json")
		_ = a.buf.WriteByte('[')
	} else {
		_ = a.buf.WriteByte(',')
	}
	a.count++
	_, err = a.buf.Write(data)
	return err
}

// finish takes the walk's result: an error after the first piece can only break the connection.
func (a *array) finish(err error) error {
	if err == nil {
		return nil
	}
	a.ended = true
	if a.count > 0 {
		panic(http.ErrAbortHandler)
	}
	return explain("the directory", err)
}

func (a *array) close() {
	if a.ended {
		return
	}
	a.ended = true
	if a.count == 0 {
		reply.JSON(a.w, http.StatusOK, []string{})
		return
	}
	_ = a.buf.WriteByte(']')
	_ = a.buf.Flush()
}

func (a *API) makeDirectories(w http.ResponseWriter, r *http.Request) error {
	return a.eachPermission(w, r, true, (*place).makeDirectory)
}

// makeDirectory makes the directory, with these attributes if it was not there before.
func (p *place) makeDirectory(want attributes) error {
	err := unix.Mkdirat(p.fd(), p.name, 0o755)
	if err == nil {
		return p.change(want)
	}
	if err != unix.EEXIST {
		return err
	}
	fd, openErr := safefile.Openat(p.fd(), p.name, unix.O_PATH|unix.O_DIRECTORY, 0)
	if openErr != nil {
		return openErr // ENOTDIR: something else has the name
	}
	return unix.Close(fd)
}

func (a *API) removeDirectories(w http.ResponseWriter, r *http.Request) error {
	paths := r.URL.Query()["path"]
	if len(paths) == 0 {
		return reply.Errorf(wire.CodeMissingQuery, "The query parameter path is missing.")
	}
	for i, given := range paths {
		if err := a.removeDirectory(r.Context(), given); err != nil {
			return partway(err, paths[:i])
		}
	}
	return done(w)
}

func (a *API) removeDirectory(ctx context.Context, given string) error {
	p, err := a.locate(given, false)
	if missing(err) {
		return nil
	}
	if err != nil {
		return err
	}
	defer p.Close()
	if p.name == "." {
		return reply.Errorf(wire.CodeInvalidQuery, "%s cannot be deleted.", asGiven(given)).WithHint("Give the directory by its name.")
	}
	if err := removeAll(ctx, p.fd(), p.name, 1); err != nil {
		return explain(given, err)
	}
	return nil
}

// replace exchanges a text for another wherever it occurs in the given files.
func (a *API) replace(w http.ResponseWriter, r *http.Request) error {
	verbose, err := boolean(r, "verbose", false)
	if err != nil {
		return err
	}
	var body map[string]wire.Replacement
	if err := reply.Decode(w, r, &body, bodyMax, wire.CodeInvalidRequestBody); err != nil {
		return err
	}
	for given, change := range body {
		if change.Old == "" {
			return reply.Errorf(wire.CodeInvalidRequestBody, "%s: old is empty.", given)
		}
	}
	counts := map[string]wire.ReplacementCount{}
	paths := sortedKeys(body)
	for i, given := range paths {
		n, err := a.replaceOne(given, body[given])
		if err != nil {
			return partway(explain(given, err), paths[:i])
		}
		counts[given] = wire.ReplacementCount{ReplacedCount: n}
	}
	if !verbose {
		return done(w)
	}
	reply.JSON(w, http.StatusOK, counts)
	return nil
}

func (a *API) replaceOne(given string, change wire.Replacement) (count int, err error) {
	p, err := a.locate(given, false)
	if err != nil {
		return 0, err
	}
	defer p.Close()
	if err := p.follow(); err != nil {
		return 0, err
	}
	in, _, err := safefile.OpenRegular(p.fd(), p.name, unix.O_RDONLY|unix.O_NOFOLLOW)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	err = p.write(attributes{mode: -1, uid: -1, gid: -1}, false, func(out io.Writer) (bool, error) {
		count, err = substitute(out, in, []byte(change.Old), []byte(change.New))
		return count > 0, err
	})
	return count, err
}

// substitute copies with every occurrence exchanged, holding no more than a buffer and the text looked for.
func substitute(out io.Writer, in io.Reader, from, to []byte) (count int, err error) {
	buf := make([]byte, 0, bufferSize+len(from))
	for {
		n, readErr := io.ReadFull(in, buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		last := readErr == io.EOF || readErr == io.ErrUnexpectedEOF
		if readErr != nil && !last {
			return count, readErr
		}
		rest := buf
		for {
			i := bytes.Index(rest, from)
			if i < 0 {
				break
			}
			count++
			if _, err := out.Write(rest[:i]); err != nil {
				return count, err
			}
			if _, err := out.Write(to); err != nil {
				return count, err
			}
			rest = rest[i+len(from):]
		}
		keep := 0
		if !last {
			keep = min(len(rest), len(from)-1) // may be the beginning of an occurrence
		}
		if _, err := out.Write(rest[:len(rest)-keep]); err != nil {
			return count, err
		}
		if last {
			return count, nil
		}
		buf = buf[:copy(buf[:cap(buf)], rest[len(rest)-keep:])]
	}
}
