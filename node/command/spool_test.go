// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func testSpool(t *testing.T, perLog, total int64) *Spool {
	t.Helper()
	dir, err := os.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = dir.Close() })
	s := newSpool(dir)
	s.commandMax, s.total = perLog, total
	return s
}

// Whatever is written, however it is trimmed and wherever a reader is: each byte it gets is the right one of the
// right stream, and what it does not get it is told about.
func TestLogAgainstAModel(t *testing.T) {
	for seed := range uint64(20) {
		rnd := rand.New(rand.NewPCG(seed, 1))
		s := testSpool(t, 20_000, 1<<40)
		l := s.newLog("x")
		l.opened(1)
		var model []byte
		var streams []Stream
		type view struct {
			*Reader
			at int64
		}
		var views []*view
		check := func(v *view, stop bool) {
			buf := make([]byte, 1+rnd.IntN(3000))
			for {
				n, stream, lost, done, err := v.Read(buf)
				if err != nil {
					t.Fatal(err)
				}
				v.at += lost
				if !bytes.Equal(buf[:n], model[v.at:v.at+int64(n)]) {
					t.Fatalf("seed %d: wrong bytes at %d", seed, v.at)
				}
				for i := range n {
					if streams[v.at+int64(i)] != stream {
						t.Fatalf("seed %d: wrong stream at %d", seed, v.at+int64(i))
					}
				}
				v.at += int64(n)
				if done != (n == 0 && stop && v.at == int64(len(model))) {
					t.Fatalf("seed %d: done %v at %d of %d", seed, done, v.at, len(model))
				}
				if n == 0 || !stop && rnd.IntN(4) == 0 {
					return
				}
			}
		}
		for range 400 {
			switch rnd.IntN(6) {
			case 0:
				from := int64(rnd.IntN(len(model) + 1))
				r, err := l.follow(from, true)
				if err != nil {
					t.Fatal(err)
				}
				views = append(views, &view{r, from})
			case 1:
				if len(views) > 0 {
					check(views[rnd.IntN(len(views))], false)
				}
			default:
				data := make([]byte, 1+rnd.IntN(1+rnd.IntN(2000)))
				for i := range data {
					data[i] = byte(rnd.Uint32())
				}
				stream := Stream(rnd.IntN(2))
				for range data {
					streams = append(streams, stream)
				}
				model = append(model, data...)
				l.append(stream, data)
			}
			if got := l.size(); got > 20_000 || got != s.used.Load() {
				t.Fatalf("seed %d: holds %d, counted as %d", seed, got, s.used.Load())
			}
		}
		l.writerGone()
		end, _, err := l.extent()
		if err != nil || end != int64(len(model)) {
			t.Fatalf("end %d of %d: %v", end, len(model), err)
		}
		l.finish(end)
		for _, v := range views {
			check(v, true)
			v.Close()
		}
		s.forget(l)
		if s.used.Load() != 0 {
			t.Errorf("seed %d: %d bytes are left in the account", seed, s.used.Load())
		}
		if names, _ := os.ReadDir(s.dir.Name()); len(names) != 0 {
			t.Errorf("seed %d: files are left: %v", seed, names)
		}
	}
}

// Writers and readers at once, for the race detector and for the hole that opens under a reader.
func TestLogConcurrently(t *testing.T) {
	s := testSpool(t, 64_000, 100_000)
	var all sync.WaitGroup
	for i := range 4 {
		l := s.newLog(string(rune('a' + i)))
		l.opened(2)
		for w := range 2 {
			all.Add(1)
			go func() {
				defer all.Done()
				defer l.writerGone()
				for n := range 300 {
					l.append(Stream(w), bytes.Repeat([]byte{byte('A' + w)}, 1+n*7%3000))
				}
			}()
		}
		for range 2 {
			r, err := l.follow(0, true)
			if err != nil {
				t.Fatal(err)
			}
			all.Add(1)
			go func() {
				defer all.Done()
				defer r.Close()
				buf := make([]byte, 5000)
				for {
					n, stream, _, done, err := r.Read(buf)
					if err != nil {
						t.Error(err)
						return
					}
					for _, c := range buf[:n] {
						if c != byte('A'+stream) {
							t.Errorf("%q in stream %d", c, stream)
							return
						}
					}
					if done {
						return
					}
					if n == 0 {
						<-r.Ready()
					}
				}
			}()
		}
		all.Add(1)
		go func() {
			defer all.Done()
			for {
				l.mu.Lock()
				left := l.writers
				l.mu.Unlock()
				if left == 0 {
					end, _, _ := l.extent()
					l.finish(end)
					return
				}
			}
		}()
	}
	all.Wait()
	if used := s.used.Load(); used > 100_000 {
		t.Errorf("%d bytes are held", used)
	}
}

// What a program wrote before its end is moved even if the pipe is never read before, and never ends.
// Each stream alone, from any byte of it, also when the beginning is gone and after the daemon was started anew.
func TestOneStreamOfALog(t *testing.T) {
	spool := testSpool(t, 1<<20, 1<<20)
	log := spool.newLog("x")
	log.opened(1)
	var whole [2]string
	for i := range 200 {
		s := Stream(i / 3 % 2)
		text := fmt.Sprintf("%d:%d,", s, i)
		whole[s] += text
		log.append(s, []byte(text))
	}
	check := func(log *Log) {
		t.Helper()
		for s, text := range whole {
			end, lost := log.extentOf(Stream(s))
			if int(end) != len(text) {
				t.Errorf("stream %d has %d bytes, want %d", s, end, len(text))
			}
			for from := lost; from <= end; from += 7 {
				r, err := log.followStream(Stream(s), from)
				if err != nil {
					t.Fatal(err)
				}
				var got []byte
				buf := make([]byte, 100)
				for {
					n, _, _, _, err := r.Read(buf)
					if err != nil {
						t.Fatal(err)
					}
					if n == 0 {
						break
					}
					got = append(got, buf[:n]...)
				}
				r.Close()
				if string(got) != text[from:] {
					t.Fatalf("stream %d from %d of %d: %q, want %q", s, from, end, got, text[from:])
				}
			}
		}
	}
	check(log)
	log.shrink(333)
	if a, b := log.dropped[0], log.dropped[1]; a+b != 333 || a == 0 || b == 0 {
		t.Errorf("dropped %d and %d", a, b)
	}
	check(log)
	end, lost, _ := log.extent()
	log.finish(end)
	log.writerGone()
	again := spool.newLog("x")
	again.recall(end, lost)
	for s, text := range whole {
		end, lost := again.extentOf(Stream(s))
		if kept := log.count[s] - log.dropped[s]; end-lost != kept {
			t.Errorf("stream %d has %d of %d bytes", s, end-lost, kept)
		}
		r, err := again.followStream(Stream(s), lost)
		if err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, 3)
		n, _, _, _, err := r.Read(buf)
		r.Close()
		if want := text[log.dropped[s]:][:3]; err != nil || !strings.HasPrefix(want, string(buf[:n])) || n == 0 {
			t.Errorf("stream %d begins with %q, want %q (%v)", s, buf[:n], want, err)
		}
	}
}

func TestDrainMovesWhatIsThere(t *testing.T) {
	l := testSpool(t, 1<<20, 1<<20).newLog("x")
	p, w, err := newPipe(Stdout)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(make([]byte, 60_000)); err != nil {
		t.Fatal(err)
	}
	l.opened(1)
	copied, drained := make(chan struct{}), make(chan struct{})
	l.mu.Lock() // nothing can be stored yet
	go func() {
		defer close(copied)
		p.copy(l)
	}()
	for waiting := 1; waiting > 0; { // until copy has it in its hands
		_ = p.raw.Control(func(fd uintptr) { waiting, err = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
		if err != nil {
			t.Fatal(err)
		}
	}
	go func() {
		defer close(drained)
		p.drain(l)
	}()
	select {
	case <-drained:
		t.Error("drained before anything was stored")
	case <-time.After(50 * time.Millisecond):
	}
	l.mu.Unlock()
	<-drained
	if end, _, err := l.extent(); end != 60_000 || err != nil {
		t.Errorf("%d bytes, %v", end, err)
	}
	if _, err := w.Write([]byte("later")); err != nil { // a leftover may go on
		t.Fatal(err)
	}
	_ = w.Close()
	<-copied
	if end, _, _ := l.extent(); end != 60_005 {
		t.Errorf("%d bytes in the end", end)
	}
	l.finish(60_000)
}
