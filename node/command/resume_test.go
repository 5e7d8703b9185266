// SPDX-License-Identifier: Apache-2.0

package command

import (
	"bytes"
	"encoding/base64"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"opensandbox.io/node/wire"
)

// followed gives the events from an offset on, read in steps of a size. Every so often something else is said, which
// breaks off the event of a line that is being sent. A log that still grows is read as far as it goes.
func followed(t *testing.T, log *Log, from int64, exact bool, step, interrupts int) []wire.ExecutionEvent {
	t.Helper()
	reader, err := log.follow(from, false)
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	var sent bytes.Buffer
	f := newFramer(&sent, exact)
	f.reader = reader
	if err := f.resume(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, step)
	for turn := 1; ; turn++ {
		n, s, lost, done, err := reader.Read(buf)
		if err != nil || lost > 0 {
			t.Fatal(err, lost)
		}
		f.feed(s, buf[:n])
		if done {
			f.close()
		}
		if n == 0 {
			f.cut()
			break
		}
		if interrupts > 0 && turn%interrupts == 0 {
			f.cut() // as a ping does
		}
	}
	f.flush()
	if f.failed != nil || f.gone != nil || f.lost != 0 {
		t.Fatal(f.failed, f.gone, f.lost)
	}
	var events []wire.ExecutionEvent
	for event := range bytes.SplitSeq(bytes.TrimSuffix(sent.Bytes(), []byte("\n\n")), []byte("\n\n")) {
		if len(event) > 0 {
			events = append(events, parsed(t, event))
		}
	}
	return events
}

// joined puts the texts or bytes of each stream together.
func joined(t *testing.T, events []wire.ExecutionEvent) (whole [2]string) {
	t.Helper()
	for _, e := range events {
		data, err := base64.StdEncoding.DecodeString(e.Data)
		if err != nil {
			t.Fatal(err)
		}
		s := Stdout
		if e.Type == "stderr" {
			s = Stderr
		}
		whole[s] += e.Text + string(data)
	}
	return whole
}

// randomOutput has everything that makes framing hard: both streams in turn, lines that never end, long ones, empty
// ones, carriage returns, runes in parts. Unless it is clean, also what is no UTF-8.
func randomOutput(random *rand.Rand, clean bool) (output []written) {
	parts := []string{"\n", "\n\n", "\r", "\r\n", "a", "some text", "line\n", "€", "€😀€", strings.Repeat("long ", 30)}
	if !clean {
		parts = append(parts, "\xe2", "\x82", "\xac", "\xff", "\xf0\x9f", "\x98\x80")
	}
	rest := [2]string{}
	for range 1 + random.IntN(40) {
		text, s := "", Stream(random.IntN(2))
		for range 1 + random.IntN(4) {
			text += parts[random.IntN(len(parts))]
		}
		text = rest[s] + text
		at := random.IntN(len(text) + 1) // anywhere, also within a rune
		output, rest[s] = append(output, written{s, text[:at]}), text[at:]
	}
	return append(output, written{Stdout, rest[Stdout]}, written{Stderr, rest[Stderr]})
}

// same is true for texts that say the same about the same bytes. Where the output is no UTF-8 it depends on how it is
// read whether the bytes beside the bad ones are shown as a rune.
func same(a, b [2]string, clean bool) bool {
	if clean {
		return a == b
	}
	for s := range a {
		if plain(a[s]) != plain(b[s]) {
			return false
		}
	}
	return true
}

// plain has one U+FFFD for each byte that is not ASCII.
func plain(text string) string {
	var out strings.Builder
	for _, r := range text {
		switch {
		case r == utf8.RuneError || r < utf8.RuneSelf:
			out.WriteRune(r)
		default:
			out.WriteString(strings.Repeat("\uFFFD", utf8.RuneLen(r)))
		}
	}
	return out.String()
}

// A client that comes back at the offset of any event gets the rest, all of it once, however the output is cut.
func TestResumingAtAnyEventGivesTheRestOnce(t *testing.T) {
	for seed := range uint64(25) {
		random := rand.New(rand.NewPCG(seed, 5))
		// A spool in which a line counts as long from 128 bytes on.
		spool := testSpool(t, 1024, 64<<20)
		clean := seed%2 == 0
		output := randomOutput(random, clean)
		size := 0
		for i, w := range output {
			if size += len(w.data) + 8; size > 1000 {
				output = output[:i]
				break
			}
		}
		resumable(t, random, spool, output, clean, seed)
	}
}

// Where the beginning of a rune turns out to be none only after the other stream has spoken.
func TestResumingBesideABrokenRune(t *testing.T) {
	long := strings.Repeat("x", 150)
	for seed, output := range [][]written{
		{{Stderr, long + "\xe2"}, {Stdout, "line\n"}, {Stderr, "\xe2"}, {Stdout, "more\n"}, {Stderr, "\x82\xac\n"}},
		{{Stderr, long + "\xe2"}, {Stdout, "part"}, {Stderr, "\xf0\x9f"}, {Stdout, "\n"}, {Stderr, "\x98\x80"}, {Stdout, "end"}},
	} {
		resumable(t, rand.New(rand.NewPCG(uint64(seed), 6)), testSpool(t, 1024, 64<<20), output, false, uint64(seed))
	}
}

// resumable comes back at every event of some output.
func resumable(t *testing.T, random *rand.Rand, spool *Spool, output []written, clean bool, seed uint64) {
	t.Helper()
	log := spool.newLog("x")
	log.opened(1)
	for half := range 2 { // first while it runs, then after its end
		part := output[:len(output)/2]
		if half == 1 {
			part = output[len(output)/2:]
		}
		for _, w := range part {
			log.append(w.stream, []byte(w.data))
		}
		if half == 1 {
			end, _, _ := log.extent()
			log.finish(end)
		}
		for _, exact := range []bool{false, true} {
			interrupts := random.IntN(3)
			all := followed(t, log, 0, exact, 1+random.IntN(50), interrupts)
			whole := joined(t, all)
			var previous int64
			for i, e := range all {
				if e.Offset == nil || *e.Offset <= previous {
					t.Fatalf("seed %d: offset %v after %d", seed, e.Offset, previous)
				}
				previous = *e.Offset
				rest := followed(t, log, *e.Offset, exact, 1+random.IntN(50), random.IntN(3))
				got := joined(t, append(slices.Clone(all[:i+1]), rest...))
				if !same(got, whole, clean || exact) {
					t.Fatalf("seed %d exact %v finished %v, at %d behind event %d:\n%q\nwant\n%q\noutput %q", seed, exact, half == 1, *e.Offset, i, got, whole, output)
				}
				// And from where that one left off a third goes on.
				if len(rest) > 0 {
					j := random.IntN(len(rest))
					again := rest[j]
					last := followed(t, log, *again.Offset, exact, 1+random.IntN(50), random.IntN(3))
					if got := joined(t, slices.Concat(all[:i+1], rest[:j+1], last)); !same(got, whole, clean || exact) {
						t.Fatalf("seed %d exact %v finished %v, at %d and then %d:\n%q\nwant\n%q\noutput %q", seed, exact, half == 1, *e.Offset, *again.Offset, got, whole, output)
					}
				}
			}
		}
	}
	log.writerGone()
	spool.forget(log)
}
