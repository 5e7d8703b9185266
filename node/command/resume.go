// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"unicode/utf8"
)

// resume puts a framer whose reader stands at the offset of an event into the state in which the framer was that sent
// it, so that the rest comes once, in the same texts. What it has to know is in the output itself:
//
//   - Of the stream that wrote the byte before the offset all is sent up to there; a newline there is pending.
//   - Of the other stream all complete lines are sent. Its last, incomplete one is not, unless it was so long already
//     that it was being sent as it grew.
//
// After the command's end there are the offsets that close gives to incomplete lines, which it sends all the same.
func (f *framer) resume() error {
	r := f.reader
	end, finished := r.log.own()
	if finished && r.off > end { // both are sent
		r.off = end
		return nil
	}
	if f.exact || r.off == 0 {
		return nil
	}
	owner, last, err := r.byteBefore()
	if err != nil || last < 0 {
		return err // dropped: the reader will tell
	}
	own, other := &f.lines[owner], &f.lines[1-owner]
	if err := f.recover(other); err != nil {
		return err
	}
	if last == '\n' || last == '\r' {
		own.pending = last == '\n'
		return nil
	}
	if err := f.recover(own); err != nil {
		return err
	}
	atEnd := finished && r.off == end
	switch {
	case own.form == inPieces, !atEnd && own.size+utf8.UTFMax > r.repeatable():
		own.form, own.pending = inPieces, false
		own.text = nil // the offset is in front of the beginning of a rune, where there is one
	case atEnd && other.leftover():
		f.oneLeft = true // the other one
		*other = line{stream: other.stream}
	default:
		*own = line{stream: owner}
	}
	return nil
}

// recover finds the line of a stream that was incomplete at the reader's offset.
func (f *framer) recover(l *line) error {
	r := f.reader
	from, end, err := r.lastOf(l.stream)
	if err != nil || from == end {
		return err
	}
	buf := buffers.Get().(*[chunk]byte)
	defer buffers.Put(buf)
	// Lines are short: look at a little before a lot.
	for window := int64(chunk); ; window *= 2 {
		begin := max(end-window, from)
		*l = line{stream: l.stream}
		terminated, rest, err := f.scan(l, begin, end, buf[:])
		if err != nil {
			return err
		}
		if l.size > r.repeatable() {
			// It was being sent while it grew.
			l.form, l.pending, l.text = inPieces, false, rest
			return nil
		}
		if terminated || begin == from {
			if l.size > chunk {
				l.form, l.text = spooled, nil
			}
			return nil
		}
	}
}

// scan reads a part of the output and leaves in l what of its stream is incomplete at the end of it; of a line longer
// than a chunk not the text. rest is what would not be sent yet if it were sent in pieces.
func (f *framer) scan(l *line, begin, end int64, buf []byte) (terminated bool, rest []byte, err error) {
	reader, err := f.reader.log.peek(begin)
	if err != nil {
		return false, nil, err
	}
	reader.filter, reader.wanted = true, l.stream
	var pieces line
	for reader.off < end {
		n, _, lost, done, err := reader.Read(buf[:min(int64(len(buf)), end-reader.off)])
		if err != nil || n == 0 && done {
			return terminated, pieces.text, err
		}
		if lost > 0 {
			*l = line{stream: l.stream}
		}
		if over := reader.off - end; over > 0 { // what comes before was dropped or of the other stream
			n = max(0, n-int(over))
			reader.off = end
		}
		data := buf[:n]
		if at := max(bytes.LastIndexByte(data, '\n'), bytes.LastIndexByte(data, '\r')); at >= 0 {
			terminated = true
			l.pending, l.size, l.text, pieces.text = data[at] == '\n', 0, l.text[:0], pieces.text[:0]
			data = data[at+1:]
		}
		if len(data) == 0 {
			continue
		}
		if l.size == 0 {
			l.start = reader.before(len(data))
		}
		if l.size += int64(len(data)); l.size <= chunk {
			l.text = append(l.text, data...)
		}
		_, keep := pieces.split(data, reader.off)
		pieces.text = append(pieces.text[:0], keep...)
		l.fed = reader.off
	}
	return terminated, pieces.text, nil
}

// peek makes a second reader at an offset, good as long as another one is open.
func (l *Log) peek(off int64) (*Reader, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := &Reader{log: l, off: off, beyond: true}
	return r, r.locate()
}

// byteBefore gives the byte before the reader's offset and whose it is; -1 when it is not kept.
func (r *Reader) byteBefore() (s Stream, value int, err error) {
	before, err := r.log.peek(r.off - 1)
	if err != nil {
		return 0, -1, err
	}
	var b [1]byte
	n, s, lost, _, err := before.Read(b[:])
	if err != nil || n == 0 || lost > 0 {
		return 0, -1, err
	}
	return s, int(b[0]), nil
}

// lastOf gives where what is kept begins, and the end of what a stream wrote last before the reader's offset; the same
// place twice when it is nothing.
func (r *Reader) lastOf(s Stream) (from, end int64, err error) {
	at, err := r.log.peek(r.off - 1)
	if err != nil {
		return 0, 0, err
	}
	l := r.log
	l.mu.Lock()
	defer l.mu.Unlock()
	from = l.base
	switch {
	case r.off <= l.base:
		return from, from, nil
	case at.stream == s:
		return from, r.off, nil
	case at.entry <= l.firstEntry:
		return from, from, nil // the other one wrote all that is kept
	}
	end, _, err = l.change(at.entry - 1)
	return from, max(from, end), err
}
