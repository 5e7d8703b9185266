// SPDX-License-Identifier: Apache-2.0

package isolated

import (
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// Between the look at a directory and its opening somebody puts a link there: it is not followed, also not out of the
// tree by a name of more than one part.
func TestDirectoriesAreOpenedWithoutLinks(t *testing.T) {
	dir := t.TempDir()
	if err := errors.Join(os.Mkdir(filepath.Join(dir, "real"), 0o755), os.Symlink("real", filepath.Join(dir, "link")), os.Symlink("/etc", filepath.Join(dir, "away"))); err != nil {
		t.Fatal(err)
	}
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(at)
	for name, ok := range map[string]bool{"real": true, "link": false, "away": false, "..": false, "real/../..": false, "/etc": false} {
		fd, err := openDir(at, name)
		if (err == nil) != ok {
			t.Errorf("%s: %v", name, err)
		}
		if err == nil {
			_ = unix.Close(fd)
		}
	}
}

// A program that nests directories without end gets an answer, and execd keeps its descriptors.
func TestDepthIsBounded(t *testing.T) {
	upper, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer upper.Close()
	at := int(upper.Fd())
	for range depthMax + 2 {
		if err := unix.Mkdirat(at, "d", 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := openDir(at, "d")
		if err != nil {
			t.Fatal(err)
		}
		if at != int(upper.Fd()) {
			_ = unix.Close(at)
		}
		at = next
	}
	_ = unix.Close(at)
	if err := walk(t.Context(), int(upper.Fd()), -1, "/", 0, false, func(*entry) error { return nil }); err == nil {
		t.Error("no end")
	}
}

// layered is a session with one overlay, without processes.
func layered(t *testing.T, bytes int64) (s *isolate, upper, lower string) {
	t.Helper()
	upper, lower = t.TempDir(), t.TempDir()
	l := layer{path: "/ws"}
	for path, f := range map[string]**os.File{upper: &l.upper, lower: &l.lower} {
		opened, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { opened.Close() })
		*f = opened
	}
	return &isolate{plan: &plan{setup: setup{Bytes: bytes}}, layers: []layer{l}}, upper, lower
}

// sparse makes a file of a size that nobody could hold, with a few bytes in its middle.
func sparse(t *testing.T, path string, size int64) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte("middle"), size/2); err != nil {
		t.Fatal(err)
	}
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
}

// Long paths, each byte of which takes six in JSON, do not make execd hold what a session can write.
func TestTheListIsBoundedInBytes(t *testing.T) {
	s, upper, _ := layered(t, 1<<20)
	at, err := unix.Open(upper, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("\x01", 250)
	for range 60 {
		if err := unix.Mkdirat(at, long, 0o755); err != nil {
			t.Fatal(err)
		}
		next, err := openDir(at, long)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(at)
		at = next
	}
	for i := range 120 {
		if err := unix.Mknodat(at, strconv.Itoa(i), unix.S_IFREG|0o644, 0); err != nil {
			t.Fatal(err)
		}
	}
	_ = unix.Close(at)
	w := httptest.NewRecorder()
	if err := s.sendList(w, httptest.NewRequest("GET", "/", nil)); err != nil {
		t.Fatal(err)
	}
	size := w.Body.Len()
	var told wire.IsolatedDiff
	if err := json.Unmarshal(w.Body.Bytes(), &told); err != nil || told.Truncated == nil || !*told.Truncated || len(told.Changes) < 60 {
		t.Errorf("%v, %d changes, truncated: %v", err, len(told.Changes), told.Truncated)
	}
	if size > listBytesMax+100 {
		t.Errorf("the list has %d bytes", size)
	}
}

func TestAListWithoutChanges(t *testing.T) {
	s, _, _ := layered(t, 1<<20)
	w := httptest.NewRecorder()
	if err := s.sendList(w, httptest.NewRequest("GET", "/", nil)); err != nil || w.Body.String() != "{\"changes\":[]}\n" || w.Header().Get("Content-Type") != "application/json" {
		t.Errorf("%v %q %v", err, w.Body, w.Header())
	}
}

// A directory with more names than are held at once is seen whole, also one that hides another.
func TestLargeDirectories(t *testing.T) {
	upper, lower := t.TempDir(), t.TempDir()
	for i := range namesMax + 10 {
		for dir, name := range map[string]string{upper: "new", lower: "old"} {
			if err := os.WriteFile(filepath.Join(dir, name+strconv.Itoa(i)), nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
	up, err1 := os.Open(upper)
	low, err2 := os.Open(lower)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	defer low.Close()
	seen := map[string]wire.IsolatedChangeChange{}
	count := 0
	err := walk(t.Context(), int(up.Fd()), int(low.Fd()), "/", 0, true, func(e *entry) error {
		seen[e.path] = e.change
		count++
		return nil
	})
	if want := 2 * (namesMax + 10); err != nil || len(seen) != want || count != want || seen["/new5"] != wire.IsolatedChangeChangeCreated || seen["/old5"] != wire.IsolatedChangeChangeDeleted {
		t.Errorf("%v, %d of %d names", err, len(seen), count)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := walk(ctx, int(up.Fd()), int(low.Fd()), "/", 0, true, func(*entry) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("nobody waits, and it goes on: %v", err)
	}
}

// A file that is all holes is neither sent nor compared byte by byte.
func TestHolesAreNotRead(t *testing.T) {
	s, upper, lower := layered(t, 1<<20)
	sparse(t, filepath.Join(upper, "same"), 1<<42)
	sparse(t, filepath.Join(lower, "same"), 1<<42)
	w := httptest.NewRecorder()
	if err := s.sendList(w, httptest.NewRequest("GET", "/", nil)); err != nil || w.Body.String() != "{\"changes\":[]}\n" {
		t.Errorf("%v %s", err, w.Body)
	}
	sparse(t, filepath.Join(upper, "new"), 64<<20)
	w = httptest.NewRecorder()
	err := s.sendTar(w, httptest.NewRequest("GET", "/", nil))
	var f *reply.Fault
	if !errors.As(err, &f) || !strings.Contains(f.Message, "/ws/new") || w.Body.Len() > 0 {
		t.Errorf("%v, %d bytes", err, w.Body.Len())
	}
}
