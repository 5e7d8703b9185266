// SPDX-License-Identifier: Apache-2.0

package file

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

// stream is a client that watches.
type stream struct {
	*bench
	body   io.ReadCloser
	events chan wire.FileEvent
	cancel func()
}

func (b *bench) watch(prefix, path string, recursive bool) *stream {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	req, _ := http.NewRequestWithContext(ctx, "GET", b.url+prefix+"/files/watch?"+q("path", path, "recursive", fmt.Sprint(recursive)).Encode(), nil)
	res, err := b.c.Do(req)
	if err != nil {
		b.Fatal(err)
	}
	if res.StatusCode != 200 || res.Header.Get("Content-Type") != "text/event-stream" {
		data, _ := io.ReadAll(res.Body)
		b.Fatalf("%d %s", res.StatusCode, data)
	}
	s := &stream{b, res.Body, make(chan wire.FileEvent, 100_000), cancel}
	go func() {
		defer close(s.events)
		lines := bufio.NewScanner(res.Body)
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				var e wire.FileEvent
				if err := json.Unmarshal([]byte(data), &e); err != nil {
					b.Errorf("%v in %s", err, data)
				}
				s.events <- e
			}
		}
	}()
	b.Cleanup(s.close)
	return s
}

func (s *stream) close() {
	s.cancel()
	s.body.Close()
	for range s.events { // until it has ended
	}
}

// until gives the events up to the one that is waited for, each as `type path`.
func (s *stream) until(want string) []string {
	s.Helper()
	var got []string
	for {
		select {
		case e, ok := <-s.events:
			if !ok {
				s.Fatalf("the stream ended before %q, after %q", want, got)
			}
			text := string(e.Type) + " " + strings.TrimPrefix(e.Path, s.dir+"/")
			if e.To != "" {
				text += " " + strings.TrimPrefix(e.To, s.dir+"/")
			}
			if e.Kind == wire.FileEventKindDirectory {
				text += "/"
			}
			got = append(got, text)
			if text == want {
				return got
			}
		case <-time.After(10 * time.Second):
			s.Fatalf("no %q after %q", want, got)
		}
	}
}

func (s *stream) expect(want ...string) {
	s.Helper()
	if got := s.until(want[len(want)-1]); strings.Join(got, ", ") != strings.Join(want, ", ") {
		s.Errorf("got %q, want %q", got, want)
	}
}

func (b *bench) do(errs ...error) {
	b.Helper()
	for _, err := range errs {
		if err != nil {
			b.Fatal(err)
		}
	}
}

func TestWatch(t *testing.T) {
	b := newBench(t)
	b.put("w/sub/inner", "x")
	s := b.watch("", b.path("w"), false)
	f, err := os.Create(b.path("w/f"))
	b.do(err)
	for range 1000 {
		_, _ = io.WriteString(f, "x")
	}
	b.do(f.Chmod(0o600), f.Close())
	s.expect("create w/f", "modify w/f", "attrib w/f")
	b.do(os.Rename(b.path("w/f"), b.path("w/g")))
	s.expect("move w/f w/g")
	b.do(os.Rename(b.path("w/g"), b.path("outside")), os.Mkdir(b.path("w/d"), 0o755))
	s.expect("delete w/g", "create w/d/")
	b.do(os.Rename(b.path("outside"), b.path("w/back")), os.Remove(b.path("w/back")), os.Remove(b.path("w/d")))
	s.expect("create w/back", "delete w/back", "delete w/d/")
	// Without recursive what is below is not told.
	b.put("w/sub/new", "x")
	b.do(os.Symlink("x", b.path("w/\xff")))
	s.expect("create w/%FF")
	b.do(os.RemoveAll(b.path("w")))
	got := s.until("delete w/")
	if len(got) != 3 {
		t.Errorf("%q", got)
	}
	if _, ok := <-s.events; ok {
		t.Error("there is more after the end")
	}
}

func TestWatchRecursive(t *testing.T) {
	b := newBench(t)
	b.put("w/a/b/f", "x")
	s := b.watch("", b.path("w"), true)
	b.put("w/a/b/new", "")
	s.expect("create w/a/b/new")
	// The names of what is below follow a move, and a second one.
	b.do(os.Rename(b.path("w/a"), b.path("w/z")))
	s.expect("move w/a w/z/")
	b.do(os.Remove(b.path("w/z/b/new")))
	s.expect("delete w/z/b/new")
	// What leaves is not watched any more; what comes in is, with all that is in it.
	b.do(os.Rename(b.path("w/z"), b.path("gone")))
	s.expect("delete w/z/")
	b.put("gone/b/unseen", "x")
	b.do(os.Rename(b.path("gone"), b.path("w/back")))
	s.expect("create w/back/", "create w/back/b/", "create w/back/b/f", "create w/back/b/unseen")
	b.do(os.Remove(b.path("w/back/b/f")))
	s.expect("delete w/back/b/f")
}

// Directories that fill faster than anybody can begin to watch them: every file is told, none twice.
func TestWatchMissesNothingInNewDirectories(t *testing.T) {
	b := newBench(t)
	b.do(os.Mkdir(b.path("w"), 0o755))
	s := b.watch("", b.path("w"), true)
	const many = 200
	for i := range many {
		dir := b.path(fmt.Sprintf("w/d%d/e/f", i))
		b.do(os.MkdirAll(dir, 0o755), os.WriteFile(dir+"/file", nil, 0o644))
	}
	b.put("w/end", "")
	seen := map[string]int{}
	for _, e := range s.until("create w/end") {
		seen[e]++
	}
	eventuallySeen := func(name string) {
		for seen[name] == 0 {
			for _, e := range s.until(name) {
				seen[e]++
			}
		}
	}
	for i := range many {
		for _, name := range []string{"d%d/", "d%d/e/", "d%d/e/f/", "d%d/e/f/file"} {
			eventuallySeen("create w/" + fmt.Sprintf(name, i))
		}
	}
	for e, n := range seen {
		if n != 1 {
			t.Errorf("%s was told %d times", e, n)
		}
	}
}

func TestWatchOneFile(t *testing.T) {
	b := newBench(t)
	p := b.put("f", "x")
	s := b.watch("", p, true)
	b.put("other", "x")
	b.put("f", "y")
	s.expect("modify f")
	// As editors do.
	b.do(os.Rename(b.path("other"), p))
	s.expect("create f")
	b.do(os.Rename(p, b.path("moved")))
	s.expect("move f moved")
}

func TestWatchRefuses(t *testing.T) {
	b := newBench(t)
	for _, route := range []string{"/files/watch", "/files/tar"} {
		if status, _, _ := b.call("HEAD", route, q("path", b.dir), nil); status != 200 {
			t.Errorf("HEAD %s: %d", route, status)
		}
	}
	b.do(os.Symlink("/proc/self/fd", b.path("fd")))
	for given, code := range map[string]string{
		b.path("none"): "FILE_NOT_FOUND", "/proc": "NOT_SUPPORTED", "/proc/self/fd": "NOT_SUPPORTED", b.path("fd/0"): "", "/proc/self/cwd/x": "",
	} {
		if status, _, body := b.call("GET", "/files/watch", q("path", given), nil); status < 400 || !strings.Contains(body, code) {
			t.Errorf("%s: %d %s", given, status, body)
		}
	}
}

// At the limit there is an error at the beginning, and later an event that says what is not watched.
func TestWatchLimit(t *testing.T) {
	b := newBench(t)
	b.do(os.MkdirAll(b.path("w/a/b"), 0o755))
	a := New(nil, b.dir)
	p, err := a.locate(b.path("w"), false)
	b.do(err)
	defer p.Close()
	if _, err := newWatcher(t.Context(), p, true, 2); err == nil {
		t.Fatal("three directories with two watches")
	} else if text := explainWatch("w", err).Error(); !strings.Contains(text, "RESOURCE_EXHAUSTED") {
		t.Error(text)
	}
	w, err := newWatcher(t.Context(), p, true, 3)
	b.do(err)
	defer w.Close()
	rec := &recorder{}
	w.out = &eventStream{w: rec, control: http.NewResponseController(rec)}
	b.do(os.Mkdir(b.path("w/c"), 0o755))
	buf := make([]byte, 4096)
	n, err := w.queue.Read(buf)
	b.do(err)
	w.take(buf[:n])
	_ = w.out.flush()
	if text := rec.String(); !strings.Contains(text, `"overflow"`) || !strings.Contains(text, `w/c"`) || !strings.Contains(text, "too many") {
		t.Errorf("%s", text)
	}
}

type recorder struct{ strings.Builder }

func (*recorder) Header() http.Header { return http.Header{} }
func (*recorder) WriteHeader(int)     {}
func (*recorder) Flush()              {}

// The kernel's queue overflows while a client does not read. It learns so, and what came meanwhile is watched.
func TestWatchOverflow(t *testing.T) {
	b := newBench(t)
	b.do(os.Mkdir(b.path("w"), 0o755))
	a := New(nil, b.dir)
	p, err := a.locate(b.path("w"), false)
	b.do(err)
	defer p.Close()
	w, err := newWatcher(t.Context(), p, true, 100)
	b.do(err)
	defer w.Close()
	limit, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	b.do(err)
	var most int
	_, _ = fmt.Sscan(string(limit), &most)
	for i := range most/2 + 10 { // each of these is two events
		name := b.path(fmt.Sprintf("w/%d", i%2))
		b.do(os.WriteFile(name, nil, 0o600), os.Remove(name))
	}
	b.do(os.Mkdir(b.path("w/late"), 0o755))
	rec := &recorder{}
	w.out = &eventStream{w: rec, control: http.NewResponseController(rec)}
	buf := make([]byte, 64<<10)
	for !w.drained() {
		n, err := w.queue.Read(buf)
		b.do(err)
		w.take(buf[:n])
	}
	_ = w.out.flush()
	if !strings.Contains(rec.String(), `"overflow"`) {
		t.Error("nobody says that events were lost")
	}
	if _, ok := w.wds["late"]; !ok {
		t.Error("the directory whose event was lost is not watched")
	}
}

// A client that goes takes its watches with it.
func TestWatchEndsWithItsClient(t *testing.T) {
	b := newBench(t)
	b.put("w/a/f", "x")
	before := inotifies(t)
	var all []*stream
	for range 5 {
		all = append(all, b.watch("", b.path("w"), true))
	}
	if n := inotifies(t); n != before+5 {
		t.Errorf("%d watchers", n-before)
	}
	for _, s := range all {
		s.close()
	}
	eventually(t, func() bool { return inotifies(t) == before })
}

func inotifies(t *testing.T) (n int) {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		if to, _ := os.Readlink("/proc/self/fd/" + e.Name()); strings.Contains(to, "inotify") {
			n++
		}
	}
	return n
}

func TestWatchAsSomebody(t *testing.T) {
	if !squashable(t) {
		return
	}
	b := newBench(t)
	b.open(0o777)
	b.put("closed/f", "x")
	b.do(os.Chmod(b.path("closed"), 0o700))
	s := b.watch(somebody, b.dir, true)
	b.put("closed/unseen", "x")
	if status, _, body := b.call("PUT", somebody+"/files/content", q("path", b.path("f")), strings.NewReader("x")); status != 200 {
		t.Fatal(body)
	}
	for _, e := range s.until("create f") {
		if strings.Contains(e, "unseen") {
			t.Error("it sees what it may not")
		}
	}
	_ = unix.Unlink(filepath.Join(b.dir, "f"))
	s.until("delete f")
}
