// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/record"
	"opensandbox.io/node/wire"
)

// spooling is a daemon that has nothing but a spool and records, and one sandbox that runs.
func spooling(t *testing.T) (d *Daemon, s *sandbox, spool string) {
	t.Helper()
	dir := t.TempDir()
	records, err := record.Open(filepath.Join(dir, "records"))
	if err != nil {
		t.Fatal(err)
	}
	d = &Daemon{records: records, spools: filepath.Join(dir, "spool"), log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	s = newSandbox(record.Record{ID: "0f6a7d57-750c-4bcb-8900-3d56cb834018"})
	s.state = wire.ReportStateRunning
	spool = filepath.Join(d.spools, s.record.ID)
	if err := os.MkdirAll(spool, 0o700); err != nil {
		t.Fatal(err)
	}
	return d, s, spool
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestTheJournalIsThereBeforeDuringAndAfterTheEnd(t *testing.T) {
	d, s, spool := spooling(t)
	check := func(when, want string) {
		t.Helper()
		if text, err := d.journal(s); err != nil || string(text) != want {
			t.Errorf("%s: %q, %v", when, text, err)
		}
	}
	check("before any command", "")
	write(t, filepath.Join(spool, journalName), "{\"id\":\"a\"}\n")
	check("in the spool", "{\"id\":\"a\"}\n")
	if err := d.keepOutput(s.record.ID); err != nil {
		t.Fatal(err)
	}
	check("on its way", "{\"id\":\"a\"}\n")
	s.state = wire.ReportStateEnded
	check("kept", "{\"id\":\"a\"}\n")
	if err := d.records.Remove(s.record.ID); err != nil {
		t.Fatal(err)
	}
	check("forgotten", "")
}

func TestALongJournalIsCutBetweenLines(t *testing.T) {
	d, s, spool := spooling(t)
	line := strings.Repeat("x", 999) + "\n"
	write(t, filepath.Join(spool, journalName), strings.Repeat(line, 5<<20/1000))
	text, err := d.journal(s)
	if err != nil || len(text) > journalTail || len(text) < journalTail-1000 || len(text)%1000 != 0 {
		t.Errorf("living: %d bytes, %v", len(text), err)
	}
	if err := d.keepOutput(s.record.ID); err != nil {
		t.Fatal(err)
	}
	s.state = wire.ReportStateEnded
	text, err = d.journal(s)
	if err != nil || len(text) > journalKept || len(text) < journalKept-1000 || len(text)%1000 != 0 {
		t.Errorf("kept: %d bytes, %v", len(text), err)
	}
}

func TestAJournalThatIsNoFileIsNotRead(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"link":      func(path string) error { return os.Symlink("/etc/passwd", path) },
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			d, s, spool := spooling(t)
			write(t, filepath.Join(spool, entrypointLog), "said")
			if err := make(filepath.Join(spool, journalName)); err != nil {
				t.Fatal(err)
			}
			if text, err := d.journal(s); err == nil || len(text) > 0 {
				t.Errorf("read %q, %v", text, err)
			}
			d.gather(s)
			if string(s.remains.Output) != "said" || s.remains.Journal != nil {
				t.Errorf("remains %q %q", s.remains.Output, s.remains.Journal)
			}
		})
	}
}

func TestWhatIsLeftIsFoundWhereverTheEndLeftIt(t *testing.T) {
	d, s, spool := spooling(t)
	write(t, filepath.Join(spool, entrypointLog), strings.Repeat("a", remainsOutput)+"the end")
	write(t, filepath.Join(spool, journalName), "{\"id\":\"a\"}\n")
	s.record.End = &wire.NodeEnd{Reason: wire.NodeEndReasonKilled, At: time.Now()}
	check := func(when string) {
		t.Helper()
		d.gather(s)
		left := s.remains
		if len(left.Output) != remainsOutput || !bytes.HasSuffix(left.Output, []byte("the end")) {
			t.Errorf("%s: %d bytes of output", when, len(left.Output))
		}
		if string(left.Journal) != "{\"id\":\"a\"}\n" || left.End != s.record.End {
			t.Errorf("%s: %q %v", when, left.Journal, left.End)
		}
	}
	check("killed by the removal")
	if err := d.keepOutput(s.record.ID); err != nil {
		t.Fatal(err)
	}
	s.state = wire.ReportStateEnded
	check("ended before it")
}
