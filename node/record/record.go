// SPDX-License-Identifier: Apache-2.0

// Package record keeps what sandboxd must not forget when it is killed: one JSON file per sandbox, replaced by
// rename, and beside it the file into which the sandbox's first process writes how it ended.
//
// A sandbox has a record from the moment it is ready until it is deleted. What is found on disk or in the kernel
// without a record was never answered for, and is swept away at the next start.
package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"opensandbox.io/node/wire"
)

// Phase is what sandboxd was doing with the sandbox when the record was written.
type Phase string

// The phases of a record.
const (
	Running  Phase = "running"
	Ended    Phase = "ended"    // End is set; files and sockets are gone or going
	Deleting Phase = "deleting" // to be forgotten entirely, whatever is left of it
)

// Record is one sandbox as its file holds it.
type Record struct {
	ID         string    `json:"id"`
	Generation int       `json:"generation"`
	Protocol   int       `json:"protocol"`
	Phase      Phase     `json:"phase"`
	CreatedAt  time.Time `json:"createdAt"`
	Deadline   time.Time `json:"deadline,omitzero"`

	// Identity of the first process: a pid alone may have been given to somebody else since.
	BootID    string `json:"bootId"`
	PID       int    `json:"pid"`
	StartTime uint64 `json:"startTime"`

	Slot       int    `json:"slot"`
	CgroupTree string `json:"cgroupTree"`

	Image       string   `json:"image"`
	ImageDigest string   `json:"imageDigest"`
	Entrypoint  []string `json:"entrypoint"`

	Isolation map[string]any     `json:"isolation,omitempty"`
	Timings   map[string]float64 `json:"timings,omitempty"`
	Warnings  []string           `json:"warnings,omitempty"`

	End          *wire.NodeEnd `json:"end,omitempty"`
	Acknowledged bool          `json:"acknowledged,omitempty"`
}

// Dir is the directory of records.
type Dir string

// Open makes the directory if it is missing; only its owner may look inside.
func Open(path string) (Dir, error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return "", err
	}
	return Dir(path), nil
}

func (d Dir) file(id, suffix string) string { return filepath.Join(string(d), id+suffix) }

// Save replaces the record in one step. It does not wait for the disk: after a power failure every sandbox has
// ended anyway, and a lost record is then nothing but a lost end.
func (d Dir) Save(r *Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	temporary := d.file(r.ID, ".json.new")
	if err := os.WriteFile(temporary, text, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, d.file(r.ID, ".json"))
}

// Create writes the first record of a sandbox. Half of it, should we be killed, is as good as none: nobody was
// answered yet, and the sandbox goes with us.
func (d Dir) Create(r *Record) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return os.WriteFile(d.file(r.ID, ".json"), text, 0o600)
}

// Rename gives the files of a shell, which has an end and a log but no record yet, the name of a sandbox.
func (d Dir) Rename(from, to string) error {
	return errors.Join(os.Rename(d.file(from, ".end"), d.file(to, ".end")), os.Rename(d.file(from, ".log"), d.file(to, ".log")))
}

// Load reads every record. A file that cannot be read as one is reported in the error; the others are returned all
// the same.
func (d Dir) Load() ([]*Record, error) {
	entries, err := os.ReadDir(string(d))
	if err != nil {
		return nil, err
	}
	var records []*Record
	var bad []error
	for _, entry := range entries {
		id, ok := strings.CutSuffix(entry.Name(), ".json")
		if !ok {
			continue
		}
		text, err := os.ReadFile(d.file(id, ".json"))
		r := new(Record)
		if err == nil {
			err = json.Unmarshal(text, r)
		}
		if err == nil && r.ID != id {
			err = fmt.Errorf("holds the record of %q", r.ID)
		}
		if err != nil {
			bad = append(bad, fmt.Errorf("record %s: %w", id, err))
			continue
		}
		records = append(records, r)
	}
	return records, errors.Join(bad...)
}

// Remove forgets a sandbox: record, end, log, output and journal.
func (d Dir) Remove(id string) error {
	var failed []error
	// The record goes last: as long as it is there, an interrupted removal is taken up again.
	for _, suffix := range []string{".end", ".log", ".out", ".jsonl", ".json.new", ".json"} {
		if err := os.Remove(d.file(id, suffix)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// Sweep removes files that belong to no sandbox in keep, records that could not be read among them.
func (d Dir) Sweep(keep func(id string) bool) error {
	entries, err := os.ReadDir(string(d))
	if err != nil {
		return err
	}
	var failed []error
	for _, entry := range entries {
		if id, _, _ := strings.Cut(entry.Name(), "."); keep(id) {
			continue
		}
		if err := os.Remove(filepath.Join(string(d), entry.Name())); err != nil {
			failed = append(failed, err)
		}
	}
	return errors.Join(failed...)
}

// CreateEnd opens the file into which the sandbox's first process writes its end.
func (d Dir) CreateEnd(id string) (*os.File, error) {
	return os.OpenFile(d.file(id, ".end"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
}

// CreateLog opens the file for execd's own log and last words.
func (d Dir) CreateLog(id string) (*os.File, error) {
	return os.OpenFile(d.file(id, ".log"), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
}

// maxEnd bounds what is read of an end: it was written from inside a sandbox.
const maxEnd = 16 << 10

// End reads what the first process wrote about its end, or nil when it wrote nothing that can be believed.
func (d Dir) End(id string) *wire.NodeEnd {
	f, err := os.Open(d.file(id, ".end"))
	if err != nil {
		return nil
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxEnd))
	if err != nil {
		return nil
	}
	end := new(wire.NodeEnd)
	if json.Unmarshal(text, end) != nil {
		return nil
	}
	switch end.Reason {
	case wire.NodeEndReasonExited, wire.NodeEndReasonSignalled, wire.NodeEndReasonOutOfMemory, wire.NodeEndReasonStartFailed:
		return end
	}
	// The other reasons are sandboxd's to give.
	return nil
}

// LogTail returns the last bytes of execd's own log.
func (d Dir) LogTail(id string, size int64) string {
	f, err := os.Open(d.file(id, ".log"))
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > size {
		f.Seek(-size, io.SeekEnd)
	}
	text, _ := io.ReadAll(io.LimitReader(f, size))
	return strings.ToValidUTF8(string(text), "?")
}

// SaveOutput keeps what is left of the entry point's output after the end.
func (d Dir) SaveOutput(id string, output []byte) error {
	return os.WriteFile(d.file(id, ".out"), output, 0o600)
}

// Output returns what SaveOutput kept.
func (d Dir) Output(id string) ([]byte, error) { return os.ReadFile(d.file(id, ".out")) }

// SaveJournal keeps what is left of the journal of its commands after the end.
func (d Dir) SaveJournal(id string, journal []byte) error {
	return os.WriteFile(d.file(id, ".jsonl"), journal, 0o600)
}

// Journal returns what SaveJournal kept.
func (d Dir) Journal(id string) ([]byte, error) { return os.ReadFile(d.file(id, ".jsonl")) }
