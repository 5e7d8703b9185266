// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"slices"
)

// Instruction is one of classic BPF, laid out as the kernel's struct sock_filter.
type Instruction struct {
	Code   uint16
	Jt, Jf uint8
	K      uint32
}

// The few operations used; see <linux/bpf_common.h>.
const (
	opLoad   = 0x20 // BPF_LD|BPF_W|BPF_ABS
	opEqual  = 0x15 // BPF_JMP|BPF_JEQ|BPF_K
	opAtOrOn = 0x35 // BPF_JMP|BPF_JGE|BPF_K
	opAnyBit = 0x45 // BPF_JMP|BPF_JSET|BPF_K
	opReturn = 0x06 // BPF_RET|BPF_K
)

// Offsets in struct seccomp_data; arguments are 64 bits, their low half comes first on both architectures.
const (
	offNumber = 0
	offArch   = 4
	offArgs   = 16
)

// auditArch are the kernel's names for the ABI of a call.
var auditArch = map[string]uint32{"amd64": 0xc000003e, "arm64": 0xc00000b7}

// Archs are the architectures filters are made for.
func Archs() []string { return slices.Sorted(maps.Keys(auditArch)) }

// decision is where the tree sends a call number: a plain verdict or the rule of one call.
type decision struct {
	verdict Verdict
	rule    string
}

func (d decision) label() string {
	if d.rule != "" {
		return "rule " + d.rule
	}
	return fmt.Sprintf("return %#x", uint32(d.verdict))
}

// interval of call numbers with one decision, up to the start of the next.
type interval struct {
	start uint32
	decision
}

// Compile makes the filter of a profile: check the ABI, find the number's interval by bisection, then
// return or look at the arguments. Short, because the kernel emulates the program once per call number
// at every load (libseccomp's output for a like list is five times as long and ten times as slow).
func Compile(p Profile, arch string) ([]Instruction, error) {
	audit, ok := auditArch[arch]
	if !ok {
		return nil, fmt.Errorf("policy: no architecture %q", arch)
	}
	calls := Calls(p)
	a := &assembler{labels: map[string]int{}}
	a.load(offArch)
	a.jump(opEqual, audit, "native", decision{verdict: Kill}.label())
	a.label("native")
	a.load(offNumber)
	parts := intervals(calls, numbers[arch])
	a.bisect(parts)
	a.leaves(parts, calls)
	return a.assemble()
}

func intervals(calls map[string]Rule, numbers map[string]uint32) []interval {
	top := uint32(0)
	byNumber := map[uint32]string{}
	for name, nr := range numbers {
		byNumber[nr] = name
		top = max(top, nr)
	}
	var parts []interval
	// One past the top: everything beyond is unknown, x32 (bit 30 set) included.
	for nr := uint32(0); nr <= top+1; nr++ {
		d := decide(calls, byNumber[nr])
		if len(parts) == 0 || parts[len(parts)-1].decision != d {
			parts = append(parts, interval{nr, d})
		}
	}
	return parts
}

func decide(calls map[string]Rule, name string) decision {
	rule, allowed := calls[name]
	switch {
	case name == "":
		return decision{verdict: ENOSYS}
	case allowed && rule != nil:
		return decision{rule: name}
	case allowed:
		return decision{verdict: Allow}
	case slices.Contains(answeredENOSYS, name):
		return decision{verdict: ENOSYS}
	}
	return decision{verdict: EPERM}
}

// assembler collects instructions whose jumps still name labels.
type assembler struct {
	code   []Instruction
	goals  [][2]string // the labels of a jump, if true and if false
	labels map[string]int
	fresh  int
}

func (a *assembler) emit(i Instruction, yes, no string) {
	a.code = append(a.code, i)
	a.goals = append(a.goals, [2]string{yes, no})
}

func (a *assembler) load(offset uint32) { a.emit(Instruction{Code: opLoad, K: offset}, "", "") }
func (a *assembler) jump(op uint16, k uint32, yes, no string) {
	a.emit(Instruction{Code: op, K: k}, yes, no)
}
func (a *assembler) label(name string) { a.labels[name] = len(a.code) }

func (a *assembler) newLabel() string {
	a.fresh++
	return fmt.Sprint("label ", a.fresh)
}

// bisect emits a balanced tree over the intervals; the jump above a single one goes to its decision.
func (a *assembler) bisect(parts []interval) {
	mid := len(parts) / 2
	low, high := a.branch(parts[:mid]), a.branch(parts[mid:])
	a.jump(opAtOrOn, parts[mid].start, high.label, low.label)
	for _, b := range []branch{low, high} {
		if len(b.parts) > 1 {
			a.label(b.label)
			a.bisect(b.parts)
		}
	}
}

type branch struct {
	label string
	parts []interval
}

func (a *assembler) branch(parts []interval) branch {
	if len(parts) == 1 {
		return branch{parts[0].label(), parts}
	}
	return branch{a.newLabel(), parts}
}

// leaves emits what the tree jumps to, each once. Calls with equal rules share one.
func (a *assembler) leaves(parts []interval, calls map[string]Rule) {
	done := map[string]string{}
	for _, part := range parts {
		if part.rule == "" {
			continue
		}
		key := fmt.Sprint(calls[part.rule])
		if first, ok := done[key]; ok {
			a.labels[part.label()] = a.labels[first]
			continue
		}
		done[key] = part.label()
		a.label(part.label())
		a.rule(calls[part.rule])
	}
	for _, v := range []Verdict{Allow, EPERM, ENOSYS, Kill} {
		a.label(decision{verdict: v}.label())
		a.emit(Instruction{Code: opReturn, K: uint32(v)}, "", "")
	}
}

func (a *assembler) rule(r Rule) {
	allow, refuse := decision{verdict: Allow}.label(), decision{verdict: EPERM}.label()
	for i, clause := range r {
		otherwise := refuse
		if i < len(r)-1 {
			otherwise = a.newLabel()
		}
		for j, test := range clause {
			then := allow
			if j < len(clause)-1 {
				then = a.newLabel()
			}
			a.test(test, then, otherwise)
			if then != allow {
				a.label(then)
			}
		}
		if otherwise != refuse {
			a.label(otherwise)
		}
	}
}

func (a *assembler) test(t Test, yes, no string) {
	a.load(offArgs + 8*uint32(t.Arg))
	op := uint16(opEqual)
	if t.Op == NoBits {
		op = opAnyBit
	}
	if t.Op != In {
		yes, no = no, yes
	}
	for i, value := range t.With {
		if i == len(t.With)-1 {
			a.jump(op, value, yes, no)
			return
		}
		next := a.newLabel()
		a.jump(op, value, yes, next)
		a.label(next)
	}
}

// assemble turns labels into distances, which have eight bits and go only forward.
func (a *assembler) assemble() ([]Instruction, error) {
	for i, goal := range a.goals {
		if goal[0] == "" {
			continue
		}
		var distance [2]uint8
		for j, name := range goal {
			at, ok := a.labels[name]
			d := at - i - 1
			if !ok || d < 0 || d > 255 {
				return nil, fmt.Errorf("policy: jump at %d to %q over %d instructions", i, name, d)
			}
			distance[j] = uint8(d)
		}
		a.code[i].Jt, a.code[i].Jf = distance[0], distance[1]
	}
	return a.code, nil
}
