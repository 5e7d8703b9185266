// SPDX-License-Identifier: Apache-2.0

package pty

import "opensandbox.io/node/command"

// ringSize is how much output is kept for replay.
const ringSize = 1 << 20

// changesMax bounds what a program that alternates between its streams costs.
const changesMax = 1 << 14

// ring keeps the last output at its offsets. Its users lock.
type ring struct {
	data    []byte // ringSize, or nil before the first output
	end     int64
	changes []change // where the stream changes, oldest first
}

type change struct {
	at     int64
	stream command.Stream
}

func (r *ring) base() int64 { return max(0, r.end-ringSize) }

func (r *ring) write(s command.Stream, p []byte) {
	if r.data == nil {
		r.data = make([]byte, ringSize)
	}
	if n := len(r.changes); n == 0 || r.changes[n-1].stream != s {
		r.changes = append(r.changes, change{r.end, s})
	}
	for len(p) > 0 {
		n := copy(r.data[r.end%ringSize:], p)
		p = p[n:]
		r.end += int64(n)
	}
	base := r.base()
	drop := max(0, len(r.changes)-changesMax)
	for drop+1 < len(r.changes) && r.changes[drop+1].at <= base {
		drop++
	}
	r.changes = r.changes[drop:]
}

// read gives what follows an offset, of one stream, which must not be before base.
func (r *ring) read(at int64, buf []byte) (n int, s command.Stream) {
	limit := r.end
	for _, c := range r.changes {
		if c.at > at {
			limit = c.at
			break
		}
		s = c.stream
	}
	buf = buf[:min(int64(len(buf)), limit-at)]
	for n < len(buf) {
		n += copy(buf[n:], r.data[(at+int64(n))%ringSize:])
	}
	return n, s
}

// replay gives what follows an offset, whatever its stream.
func (r *ring) replay(at int64, buf []byte) (n int) {
	for n < len(buf) && at < r.end {
		m, _ := r.read(at, buf[n:])
		n += m
		at += int64(m)
	}
	return n
}
