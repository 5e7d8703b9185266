// SPDX-License-Identifier: Apache-2.0

package sandboxd

import (
	"bytes"
	"net/http"
	"path/filepath"

	"opensandbox.io/node/wire"
)

// The journal of a sandbox's commands: execd appends to it, sandboxd hands it on without reading it.
const (
	journalName = "records.jsonl"
	journalTail = 4 << 20 // of a living sandbox
	journalKept = 1 << 20 // after its end, and of what is left when it is deleted
)

// remainsOutput is how much of the output the answer to a delete carries.
const remainsOutput = 16 << 10

// journal is the end of what execd wrote about the commands it ran.
func (d *Daemon) journal(s *sandbox) ([]byte, error) {
	text, err := d.spooled(s, journalName, journalTail, d.records.Journal)
	return wholeLines(text, journalTail), err
}

// keepJournal saves the end of the journal before the spool goes.
func (d *Daemon) keepJournal(id string) error {
	text, err := readTail(filepath.Join(d.spools, id), journalName, journalKept)
	if err != nil || len(text) == 0 {
		return err
	}
	return d.records.SaveJournal(id, wholeLines(text, journalKept))
}

// wholeLines drops the half line that a tail of full size begins with.
func wholeLines(text []byte, most int) []byte {
	if len(text) < most {
		return text
	}
	_, rest, _ := bytes.Cut(text, []byte{'\n'})
	return rest
}

// gather reads what is left of a sandbox that has ended and is about to be forgotten. Whatever cannot be read is
// missing, and does not stop the removal.
func (d *Daemon) gather(s *sandbox) {
	id := s.record.ID
	dir := filepath.Join(d.spools, id)
	// Killed by this very removal its files are still in the spool; ended before, they have been kept.
	pick := func(what, name string, most int64, kept func(string) ([]byte, error)) []byte {
		text, err := readTail(dir, name, most)
		if err == nil && text == nil {
			if text, _ = kept(id); int64(len(text)) > most {
				text = text[int64(len(text))-most:]
			}
		}
		if err != nil {
			d.log.Warn("lost with its sandbox", "sandbox", id, "what", what, "error", err)
		}
		return text
	}
	s.remains = wire.Remains{
		Output:  pick("output", entrypointLog, remainsOutput, d.records.Output),
		Journal: wholeLines(pick("journal", journalName, journalKept, d.records.Journal), journalKept),
	}
	s.mu.Lock()
	s.remains.End = s.record.End
	s.mu.Unlock()
}

func (d *Daemon) getJournal(w http.ResponseWriter, r *http.Request) error {
	s, err := d.get(r.PathValue("id"))
	if err != nil {
		return err
	}
	journal, err := d.journal(s)
	if err != nil {
		return err
	}
	writeBytes(w, journal)
	return nil
}
