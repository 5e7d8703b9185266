// SPDX-License-Identifier: Apache-2.0

package file

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/safefile"
	"opensandbox.io/node/wire"
)

const (
	// watchesMax is how many directories one request may watch; the kernel has a limit of its own below or above it.
	watchesMax = 65536
	// watchedNamesMax bounds the names of those directories, in bytes: they can be long.
	watchedNamesMax = 16 << 20
	// seenMax bounds the names that are remembered so that a new file is not told twice.
	seenMax = 10_000
	// settle is how long a write is held back for the next one of the same file, and the first half of a move for
	// its second.
	settle = 50 * time.Millisecond
	// watchHeartbeat is how often a line goes out while nothing happens, so that a dead connection is found.
	watchHeartbeat = 15 * time.Second
)

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_ATTRIB |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK

// watch tells what happens to a directory, or to the file of a name, as server-sent events until the client goes.
//
// One goroutine reads from the kernel and writes to the client. While a client is slow nothing is read: the kernel's
// queue fills, and then says that events were lost. No memory of ours grows.
func (a *API) watch(w http.ResponseWriter, r *http.Request) error {
	given, err := required(r, "path")
	if err != nil {
		return err
	}
	recursive, err := boolean(r, "recursive", false)
	if err != nil {
		return err
	}
	p, err := a.locate(given, false)
	if err != nil {
		return err
	}
	defer p.Close()
	t, err := newWatcher(r.Context(), p, recursive, watchesMax)
	if err != nil {
		return explainWatch(given, err)
	}
	defer t.Close()
	h := w.Header()
	h.Set("Content-Type", "text/event-stream")
	h.Set("Cache-Control", "no-cache")
	h.Set("X-Accel-Buffering", "no")
	if r.Method == http.MethodHead {
		return nil // it would wait for ever to say nothing
	}
	t.out = &eventStream{w: w, control: http.NewResponseController(w)}
	// Whoever has the head of the answer knows that from here on nothing is missed.
	if t.out.comment("watching") != nil {
		return nil
	}
	t.run()
	return nil
}

var errTooManyWatches = errors.New("too many directories to watch")

func explainWatch(given string, err error) error {
	const hint = "Watch a smaller tree, without recursive, or end other watches."
	switch {
	case errors.Is(err, errTooManyWatches):
		return reply.Errorf(wire.CodeResourceExhausted, "%s has more than %d directories.", asGiven(given), watchesMax).WithHint(hint)
	case errors.Is(err, unix.ENOSPC):
		return reply.Errorf(wire.CodeResourceExhausted, "%s: the kernel's limit of watches is reached.", asGiven(given)).WithHint(hint)
	case errors.Is(err, unix.EMFILE):
		return reply.Errorf(wire.CodeResourceExhausted, "%s: the kernel's limit of watchers is reached.", asGiven(given)).WithHint(hint)
	}
	return explain(given, err)
}

// watcher is one request that watches.
type watcher struct {
	ctx       context.Context
	fd        int
	queue     *os.File // of the kernel, with the same descriptor
	stop      func() bool
	root      *os.File
	path      string // of root, for the eye
	only      string // the one name that counts; "" all
	recursive bool
	limit     int

	dirs map[int32]string // watch to directory, relative to root; "" is root
	wds  map[string]int32
	size int             // of the names in dirs
	seen map[string]bool // told by a scan; the kernel may tell them again

	changed []wire.FileEvent // writes that wait for more of the same
	from    *half            // a name that was moved away, nobody knows where to yet
	// replacing are the cookies of moves that replace a file, of which only the first half was seen yet.
	replacing []uint32
	out       *eventStream
}

// half is the first half of a move.
type half struct {
	cookie uint32
	rel    string
	isDir  bool
}

func newWatcher(ctx context.Context, p *place, recursive bool, limit int) (*watcher, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(p.fd(), p.name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	t := &watcher{ctx: ctx, path: p.path, recursive: recursive, limit: limit, dirs: map[int32]string{}, wds: map[string]int32{}, seen: map[string]bool{}}
	at := p.name
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		// Programs replace a file more often than they write into it: the name is watched, by its directory.
		at, t.only, t.path, t.recursive = ".", p.name, path.Dir(p.path), false
	}
	var err error
	if t.root, err = openDir(p.fd(), at); err != nil {
		return nil, err
	}
	if err := safefile.CheckNotProc(int(t.root.Fd())); err != nil {
		_ = t.root.Close()
		return nil, err
	}
	if t.fd, err = unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK); err != nil {
		_ = t.root.Close()
		return nil, err
	}
	t.queue = os.NewFile(uintptr(t.fd), "inotify")
	t.stop = context.AfterFunc(ctx, func() { _ = t.queue.SetReadDeadline(time.Unix(1, 0)) })
	_, err = t.add("", t.root)
	if t.only == "" && p.name != "." {
		// While the root is open the kernel does not tell its end, but that of its name. Not all may watch that; then
		// the end is noticed later.
		_, _ = unix.InotifyAddWatch(t.fd, "/proc/self/fd/"+strconv.Itoa(p.fd())+"/.", unix.IN_DELETE|unix.IN_ONLYDIR|unix.IN_MASK_CREATE)
	}
	if err == nil && t.recursive {
		err = t.scan("", t.root, false)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// Close gives all watches back.
func (t *watcher) Close() {
	t.stop()
	_ = t.queue.Close()
	_ = t.root.Close()
}

// add watches an open directory, and says whether it was not watched before. The kernel wants a path; that of the
// descriptor leads nowhere else.
func (t *watcher) add(rel string, dir *os.File) (fresh bool, err error) {
	if len(t.dirs) >= t.limit || t.size+len(rel) > watchedNamesMax {
		return false, errTooManyWatches
	}
	wd, err := unix.InotifyAddWatch(t.fd, "/proc/self/fd/"+strconv.Itoa(int(dir.Fd())), watchMask)
	if err != nil {
		return false, err
	}
	_, known := t.dirs[int32(wd)]
	t.call(int32(wd), rel)
	return !known, nil
}

// call notes the name of a watched directory.
func (t *watcher) call(wd int32, rel string) {
	t.drop(wd)
	t.dirs[wd], t.wds[rel] = rel, wd
	t.size += len(rel)
}

// drop forgets a watch.
func (t *watcher) drop(wd int32) {
	rel, ok := t.dirs[wd]
	if !ok {
		return
	}
	delete(t.dirs, wd)
	if t.wds[rel] == wd {
		delete(t.wds, rel)
	}
	t.size -= len(rel)
}

// scan watches all directories below one that is watched already. Each is watched before it is read, so that nothing
// made in it can be missed; with tell, what is found is told as new.
func (t *watcher) scan(rel string, dir *os.File, tell bool) error {
	names := prefix{""}
	var full error
	err := walk(t.ctx, dir, 1, func(at int, name string, level int, isDir bool) (bool, error) {
		if isTemporary(name) {
			return false, nil
		}
		sub := strings.TrimPrefix(names.at(level, name, isDir), "/")
		if rel != "" {
			sub = rel + "/" + sub
		}
		if tell && !t.seen[sub] {
			if len(t.seen) < seenMax {
				t.seen[sub] = true
			}
			t.tell(wire.FileEventTypeCreate, sub, "", isDir)
		}
		if !isDir {
			return false, nil
		}
		child, err := openDir(at, name)
		if err != nil {
			return false, nil // vanished, or not this user's to read
		}
		defer child.Close()
		if safefile.CheckNotProc(int(child.Fd())) != nil {
			return false, nil
		}
		if _, err := t.add(sub, child); err != nil {
			if err == unix.EACCES || err == unix.ENOENT {
				return false, nil
			}
			full = err
			return false, err
		}
		return true, nil
	})
	if full != nil {
		return full
	}
	if errors.Is(err, errTooDeep) || t.ctx.Err() != nil {
		return err
	}
	return nil // what else stops a walk is a directory that went away
}

// run tells events until the client or the directory is gone.
func (t *watcher) run() {
	buf := make([]byte, 64<<10)
	for {
		wait := watchHeartbeat
		if t.from != nil || len(t.changed) > 0 {
			wait = settle
		}
		_ = t.queue.SetReadDeadline(time.Now().Add(wait))
		if t.ctx.Err() != nil {
			return
		}
		n, err := t.queue.Read(buf)
		switch {
		case err == nil:
			if !t.take(buf[:n]) {
				t.release()
				_ = t.out.flush()
				return
			}
		case !errors.Is(err, os.ErrDeadlineExceeded) || t.ctx.Err() != nil:
			return
		case wait == settle:
			t.release()
		default:
			t.out.heartbeat()
		}
		if t.drained() {
			clear(t.seen)
			if t.gone() {
				t.tell(wire.FileEventTypeDelete, "", "", true)
				_ = t.out.flush()
				return
			}
		}
		if t.out.flush() != nil {
			return
		}
	}
}

// drained is true when the kernel has no more events: then none is left that a scan has told already.
func (t *watcher) drained() bool {
	n, err := unix.IoctlGetInt(t.fd, unix.TIOCINQ)
	return err == nil && n == 0
}

// gone is true when the watched directory has been deleted.
func (t *watcher) gone() bool {
	var st unix.Stat_t
	return unix.Fstat(int(t.root.Fd()), &st) == nil && st.Nlink == 0
}

// take handles a batch of events; false when the watched directory is gone.
func (t *watcher) take(data []byte) bool {
	for len(data) >= unix.SizeofInotifyEvent {
		wd := int32(binary.NativeEndian.Uint32(data))
		mask := binary.NativeEndian.Uint32(data[4:])
		cookie := binary.NativeEndian.Uint32(data[8:])
		size := int(binary.NativeEndian.Uint32(data[12:]))
		data = data[unix.SizeofInotifyEvent:]
		name := strings.TrimRight(string(data[:size]), "\x00")
		data = data[size:]
		if !t.event(wd, mask, cookie, name) {
			return false
		}
	}
	return true
}

func (t *watcher) event(wd int32, mask, cookie uint32, name string) bool {
	if mask&unix.IN_Q_OVERFLOW != 0 {
		t.overflow("", "Events were lost because they were read too slowly.")
		if t.recursive {
			// New directories may be among what was lost.
			t.rescan()
		}
		return true
	}
	dir, ok := t.dirs[wd]
	if !ok {
		return true // of a directory that is not watched any more
	}
	if mask&unix.IN_IGNORED != 0 {
		t.drop(wd)
		return dir != ""
	}
	if name == "" {
		return t.itself(dir, mask)
	}
	if isTemporary(name) {
		if mask&unix.IN_MOVED_FROM != 0 && isReplacing(name) {
			t.noteReplacing(cookie)
		}
		return true // ours; it will have its name soon
	}
	if t.only != "" && name != t.only && (t.from == nil || mask&unix.IN_MOVED_TO == 0) {
		return true
	}
	rel := name
	if dir != "" {
		rel = dir + "/" + name
	}
	t.named(rel, mask, cookie)
	return true
}

// noteReplacing remembers half a move that will replace a file. The other half follows at once, or never does if
// somebody inside makes such names: then all are forgotten.
func (t *watcher) noteReplacing(cookie uint32) {
	if len(t.replacing) >= 64 {
		t.replacing = t.replacing[:0]
	}
	t.replacing = append(t.replacing, cookie)
}

// itself handles what happens to a watched directory. Of all but the root its parent tells as well.
func (t *watcher) itself(dir string, mask uint32) bool {
	if dir != "" || t.only != "" && mask&unix.IN_ATTRIB != 0 {
		return true
	}
	switch {
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		t.tell(wire.FileEventTypeDelete, "", "", true)
		return false
	case mask&unix.IN_ATTRIB != 0:
		t.tell(wire.FileEventTypeAttrib, "", "", true)
	}
	return true
}

// named handles what happens to a name in a watched directory.
func (t *watcher) named(rel string, mask, cookie uint32) {
	isDir := mask&unix.IN_ISDIR != 0
	if mask&unix.IN_MOVED_TO != 0 && t.from != nil && t.from.cookie == cookie {
		from := t.from.rel
		t.from = nil
		t.tell(wire.FileEventTypeMove, from, rel, isDir)
		if isDir && t.recursive {
			t.rename(from, rel)
			t.enter(rel) // if it moved before it was watched, it is not yet
		}
		return
	}
	t.releaseMove()
	switch {
	case mask&unix.IN_MODIFY != 0:
		t.modified(rel)
	case mask&unix.IN_ATTRIB != 0:
		t.tell(wire.FileEventTypeAttrib, rel, "", isDir)
	case mask&unix.IN_MOVED_FROM != 0:
		delete(t.seen, rel)
		t.releaseWrites()
		t.from = &half{cookie, rel, isDir}
	case mask&unix.IN_DELETE != 0:
		delete(t.seen, rel)
		t.tell(wire.FileEventTypeDelete, rel, "", isDir)
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		if t.only != "" && rel != t.only {
			return
		}
		told := t.seen[rel] // by a scan
		delete(t.seen, rel)
		if told && mask&unix.IN_CREATE != 0 {
			return
		}
		if i := slices.Index(t.replacing, cookie); i >= 0 && mask&unix.IN_MOVED_TO != 0 {
			// The file was there before: for whoever watches it has other contents now.
			t.replacing = slices.Delete(t.replacing, i, i+1)
			t.modified(rel)
			return
		}
		t.tell(wire.FileEventTypeCreate, rel, "", isDir)
		if isDir && t.recursive {
			t.enter(rel)
		}
	}
}

// modified holds a write back until something else happens or nothing more comes.
func (t *watcher) modified(rel string) {
	event := t.make(wire.FileEventTypeModify, rel, "", false)
	for _, c := range t.changed {
		if c.Path == event.Path {
			return
		}
	}
	if len(t.changed) >= 64 {
		t.releaseWrites()
	}
	t.changed = append(t.changed, event)
}

func (t *watcher) release() {
	t.releaseWrites()
	t.releaseMove()
}

func (t *watcher) releaseWrites() {
	for _, event := range t.changed {
		t.out.add(event)
	}
	t.changed = t.changed[:0]
}

// releaseMove tells that a name is gone that was moved to where nobody watches.
func (t *watcher) releaseMove() {
	if t.from == nil {
		return
	}
	gone := *t.from
	t.from = nil
	t.tell(wire.FileEventTypeDelete, gone.rel, "", gone.isDir)
	if gone.isDir {
		t.forget(gone.rel)
	}
}

// tell sends an event, after the writes that came before it.
func (t *watcher) tell(kind wire.FileEventType, rel, to string, isDir bool) {
	t.releaseWrites()
	t.out.add(t.make(kind, rel, to, isDir))
}

func (t *watcher) make(kind wire.FileEventType, rel, to string, isDir bool) wire.FileEvent {
	e := wire.FileEvent{Type: kind, Path: t.shown(rel), Kind: wire.FileEventKindFile}
	if to != "" {
		e.To = t.shown(to)
	}
	if isDir {
		e.Kind = wire.FileEventKindDirectory
	}
	return e
}

func (t *watcher) shown(rel string) string { return escape(path.Join(t.path, rel)) }

func (t *watcher) overflow(rel, why string) {
	t.release()
	t.out.add(wire.FileEvent{Type: wire.FileEventTypeOverflow, Path: t.shown(rel), Kind: wire.FileEventKindDirectory, Message: why})
}

// enter begins to watch a new directory and tells what is in it by now.
func (t *watcher) enter(rel string) {
	fd, err := safefile.OpenBeneath(int(t.root.Fd()), rel, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return // gone again, or not this user's to read
	}
	dir := os.NewFile(uintptr(fd), rel)
	defer dir.Close()
	if safefile.CheckNotProc(fd) != nil {
		return
	}
	fresh, err := t.add(rel, dir)
	if err == nil && fresh {
		err = t.scan(rel, dir, true)
	}
	if err != nil {
		t.unwatched(rel, err)
	}
}

// rescan watches what is not watched yet, and sets the names of all right.
func (t *watcher) rescan() {
	dir, err := openDir(int(t.root.Fd()), ".") // the first one stands at its end
	if err != nil {
		return
	}
	defer dir.Close()
	if err := t.scan("", dir, false); err != nil {
		t.unwatched("", err)
	}
}

// unwatched says that there is a directory from which no events will come.
func (t *watcher) unwatched(rel string, err error) {
	if t.ctx.Err() == nil && err != unix.EACCES && err != unix.ENOENT {
		t.overflow(rel, "Not all below it is watched: "+err.Error()+".")
	}
}

// rename keeps the names of watched directories right when one around them moves.
func (t *watcher) rename(from, to string) {
	for rel, wd := range t.below(from) {
		t.call(wd, to+rel[len(from):])
	}
}

// forget stops watching a directory that has left the tree.
func (t *watcher) forget(rel string) {
	for _, wd := range t.below(rel) {
		_, _ = unix.InotifyRmWatch(t.fd, uint32(wd))
		t.drop(wd)
	}
}

// below gives a watched directory and those in it.
func (t *watcher) below(rel string) map[string]int32 {
	out := map[string]int32{}
	for name, wd := range t.wds {
		if name == rel || strings.HasPrefix(name, rel+"/") {
			out[name] = wd
		}
	}
	return out
}

// eventStream writes server-sent events; they go out with flush, or when there are many.
type eventStream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	buf     []byte
	err     error
}

func (s *eventStream) add(e wire.FileEvent) {
	data, err := json.Marshal(e)
	if err != nil {
		s.err = err
		return
	}
	s.buf = append(append(append(s.buf, "data: "...), data...), "\n\n"...)
	if len(s.buf) >= bufferSize {
		_ = s.flush()
	}
}

func (s *eventStream) comment(text string) error {
	s.buf = append(s.buf, ": "+text+"\n\n"...)
	return s.flush()
}

func (s *eventStream) heartbeat() { _ = s.comment("nothing new") }

func (s *eventStream) flush() error {
	if s.err == nil && len(s.buf) > 0 {
		if _, s.err = s.w.Write(s.buf); s.err == nil {
			s.err = s.control.Flush()
		}
	}
	s.buf = s.buf[:0]
	return s.err
}
