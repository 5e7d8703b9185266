// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"opensandbox.io/node/wire"
)

// How long and how many records are kept. The numbers bound the daemon's memory, whatever runs in the sandbox.
const (
	keepFor     = 24 * time.Hour
	keepRecords = 10_000
	keepText    = 16 << 20 // bytes of command lines in all
	keepContent = 16 << 10 // bytes of one
	journalMax  = 16 << 20
)

// EntrypointID is the record of the sandbox's main process.
const EntrypointID = "entrypoint"

const journalName = "records.jsonl"

// Record is what is known of one command: who ran what, when, and how it ended.
type Record struct {
	ID         string    `json:"id"`
	Content    string    `json:"content"` // the command line
	Background bool      `json:"background,omitempty"`
	Merged     bool      `json:"merged,omitempty"` // both streams went through one pipe
	RequestID  string    `json:"request_id,omitempty"`
	Client     string    `json:"client,omitempty"` // the address it came from, as ingress saw it
	UserAgent  string    `json:"user_agent,omitempty"`
	Cwd        string    `json:"cwd,omitempty"`
	UID        *int64    `json:"uid,omitempty"`
	StartedAt  time.Time `json:"started_at"`

	// With the end.
	FinishedAt *time.Time       `json:"finished_at,omitempty"`
	End        *wire.CommandEnd `json:"end,omitempty"`
	Output     int64            `json:"output,omitempty"` // bytes written in all
	Lost       int64            `json:"lost,omitempty"`   // bytes of the beginning that were dropped
}

// status is what is known of a command as the API shows it.
func (c *Command) status() wire.CommandStatus {
	r := c.Record()
	background, open := r.Background, c.stdin().open()
	output, _ := c.log.own()
	s := wire.CommandStatus{
		ID: r.ID, Content: r.Content, Running: r.End == nil, StartedAt: r.StartedAt, FinishedAt: r.FinishedAt,
		Background: &background, End: r.End, StdinOpen: &open, OutputBytes: &output,
	}
	if r.End != nil {
		s.ExitCode = r.End.ExitCode
		if s.ExitCode == nil {
			// Published clients read this field only: -1 is what they know for "no exit code".
			code := -1
			s.ExitCode = &code
		}
		if *s.ExitCode != 0 {
			s.Error = describe(r.End)
		}
	}
	return s
}

// journal appends records to a file of the spool, one JSON line at the start and one at the end of a command, so
// that what ran can be seen from outside and after the daemon.
type journal struct {
	spool *Spool
	mu    sync.Mutex
	file  *os.File
	size  int64
	err   error // the last failure, told once
}

func openJournal(s *Spool) (*journal, error) {
	f, err := s.open(journalName, unix.O_RDWR|unix.O_CREAT|unix.O_APPEND)
	if err != nil {
		return nil, err
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return &journal{spool: s, file: f, size: size}, nil
}

// write appends a line; full says that the file should be rewritten.
func (j *journal) write(r *Record) (full bool) {
	line, err := json.Marshal(r)
	if err != nil {
		panic(err) // plain fields
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	n, err := j.file.Write(append(line, '\n'))
	j.size += int64(n)
	j.err = err
	return j.size > journalMax
}

// rewrite replaces the file by one with the current records only. They are asked for with the journal locked: a line
// written in between would be gone.
func (j *journal) rewrite(current func() []Record) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	records := current()
	const temp = journalName + ".new"
	j.spool.remove(temp)
	f, err := j.spool.open(temp, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_APPEND)
	if err != nil {
		return err
	}
	w := bufio.NewWriter(f)
	e := json.NewEncoder(w)
	for i := range records {
		err = errors.Join(err, e.Encode(&records[i]))
	}
	dir := int(j.spool.dir.Fd())
	if err = errors.Join(err, w.Flush()); err == nil {
		err = unix.Renameat(dir, temp, dir, journalName)
	}
	if err != nil {
		_ = f.Close()
		j.spool.remove(temp)
		return err
	}
	_ = j.file.Close()
	j.file = f
	j.size, _ = f.Seek(0, io.SeekCurrent)
	return nil
}

func (j *journal) close() {
	j.mu.Lock()
	defer j.mu.Unlock()
	_ = j.file.Close()
}

// load reads the records of an earlier run of the daemon. Where the directory was reachable from inside the file may
// hold anything: lines that make no sense are skipped.
func (j *journal) load() []Record {
	data, err := io.ReadAll(io.LimitReader(io.NewSectionReader(j.file, 0, 4*journalMax), 4*journalMax))
	if err != nil {
		return nil
	}
	var out []Record
	at := map[string]int{}
	for line := range bytes.Lines(data) {
		var r Record
		if json.Unmarshal(line, &r) != nil || !validID(r.ID) {
			continue
		}
		if i, ok := at[r.ID]; ok {
			out[i] = r
			continue
		}
		at[r.ID] = len(out)
		out = append(out, r)
	}
	return out
}

// validID is true for what this package makes: an id becomes a file name.
func validID(id string) bool {
	if id == EntrypointID {
		return true
	}
	if len(id) != 32 {
		return false
	}
	for i := range len(id) {
		if c := id[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
