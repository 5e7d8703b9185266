// SPDX-License-Identifier: Apache-2.0

package command

import (
	"syscall"

	"opensandbox.io/node/reply"
	"opensandbox.io/node/wire"
)

// This file is for packages whose streams have events of their own between the output: cells of code with results.

// Follow reads the output from its beginning. Close the reader.
func (f *Foreign) Follow() (*Reader, error) { return f.log.follow(0, false) }

// Size is how many bytes have been written so far.
func (f *Foreign) Size() int64 {
	size, _, _ := f.log.extent()
	return size
}

// ClassifyStatus is Classify for a process that somebody else has waited for.
func (f *Foreign) ClassifyStatus(status syscall.WaitStatus, known bool) *wire.CommandEnd {
	var kills int64
	if last, ok := f.runner.measure(); ok {
		kills = last.OOMKills - f.before.OOMKills
	}
	if !known && kills > 0 {
		status, known = syscall.WaitStatus(syscall.SIGKILL), true // memory ran out, and took whoever waited for it too
	}
	return classify(status, known, nobody, kills)
}

// Offset is the byte that is read next.
func (r *Reader) Offset() int64 { return r.off }

// Send puts an event behind those that wait to be written; many may follow each other before Flush.
func (s *Streamer) Send(e wire.ExecutionEvent) error {
	data, err := reply.Marshal(e)
	if err != nil {
		return err
	}
	s.framer.out = append(append(s.framer.out, data...), "\n\n"...)
	if len(s.framer.out) >= chunk {
		s.framer.flush()
	}
	return s.framer.gone
}

// Flush writes the events that wait.
func (s *Streamer) Flush() error { return s.flush() }

// Describe puts an end in words.
func Describe(end *wire.CommandEnd) string { return describe(end) }

// PartialRune gives the number of bytes at the end of text that may be the beginning of a rune whose rest is to come.
func PartialRune(text []byte) int { return partialRune(text) }
