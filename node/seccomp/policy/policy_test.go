// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// call is struct seccomp_data without the instruction pointer.
type call struct {
	nr, arch uint32
	args     [6]uint64
}

// interpret runs a filter as the kernel does.
func interpret(code []Instruction, c call) (Verdict, error) {
	var acc uint32
	for pc := 0; pc < len(code); pc++ {
		i := code[pc]
		yes := false
		switch i.Code {
		case opLoad:
			switch {
			case i.K == offNumber:
				acc = c.nr
			case i.K == offArch:
				acc = c.arch
			case i.K >= offArgs && i.K%8 == 0:
				acc = uint32(c.args[(i.K-offArgs)/8])
			default:
				return 0, fmt.Errorf("load from %d", i.K)
			}
			continue
		case opReturn:
			return Verdict(i.K), nil
		case opEqual:
			yes = acc == i.K
		case opAtOrOn:
			yes = acc >= i.K
		case opAnyBit:
			yes = acc&i.K != 0
		default:
			return 0, fmt.Errorf("operation %#x", i.Code)
		}
		if yes {
			pc += int(i.Jt)
		} else {
			pc += int(i.Jf)
		}
	}
	return 0, fmt.Errorf("fell off the end")
}

// names and tables are the policy the other way round and once for all.
var names, tables = func() (map[string]map[uint32]string, map[Profile]map[string]Rule) {
	names, tables := map[string]map[uint32]string{}, map[Profile]map[string]Rule{}
	for arch, table := range numbers {
		names[arch] = map[uint32]string{}
		for name, nr := range table {
			names[arch][nr] = name
		}
	}
	for _, p := range Profiles {
		tables[p] = Calls(p)
	}
	return names, tables
}()

// expect reads the table directly, without intervals, trees or sharing.
func expect(p Profile, arch string, c call) Verdict {
	if c.arch != auditArch[arch] {
		return Kill
	}
	name := names[arch][c.nr]
	rule, ok := tables[p][name]
	switch {
	case name == "" || !ok && slices.Contains(answeredENOSYS, name):
		return ENOSYS
	case !ok:
		return EPERM
	case rule == nil:
		return Allow
	}
	for _, clause := range rule {
		holds := true
		for _, t := range clause {
			low := uint32(c.args[t.Arg])
			switch t.Op {
			case In:
				holds = holds && slices.Contains(t.With, low)
			case NotIn:
				holds = holds && !slices.Contains(t.With, low)
			case NoBits:
				holds = holds && low&t.With[0] == 0
			}
		}
		if holds {
			return Allow
		}
	}
	return EPERM
}

// interesting argument values: everything the rules name, their neighbours, and each with a dirty upper half.
func interesting() []uint64 {
	var values []uint64
	for _, rule := range rules {
		for _, clause := range rule {
			for _, t := range clause {
				for _, v := range t.With {
					values = append(values, uint64(v), uint64(v)+1, uint64(v)-1)
				}
			}
		}
	}
	for bit := range 32 {
		values = append(values, 1<<bit)
	}
	values = append(values, 40 /* AF_VSOCK */, 17 /* AF_PACKET */, 38 /* AF_ALG */)
	for _, v := range slices.Clone(values) {
		values = append(values, v|0xdeadbeef00000000)
	}
	slices.Sort(values)
	return slices.Compact(values)
}

func TestFiltersSayWhatTheTableSays(t *testing.T) {
	values := interesting()
	for _, arch := range Archs() {
		for _, p := range Profiles {
			code, err := Compile(p, arch)
			if err != nil {
				t.Fatal(err)
			}
			if len(code) > 200 {
				t.Errorf("%s on %s has %d instructions", p, arch, len(code))
			}
			check := func(c call) {
				t.Helper()
				got, err := interpret(code, c)
				if want := expect(p, arch, c); err != nil || got != want {
					t.Errorf("%s on %s, %+v: %#x, want %#x, %v", p, arch, c, got, want, err)
				}
			}
			for nr := range uint32(1100) {
				check(call{nr: nr, arch: auditArch[arch]})
				check(call{nr: nr, arch: auditArch[arch], args: [6]uint64{^uint64(0), ^uint64(0), ^uint64(0)}})
			}
			for _, nr := range []uint32{0x40000000, 0x40000000 | 1, 0x40000000 | 321, 0x7fffffff, 0x80000000, 0xffffffff} {
				check(call{nr: nr, arch: auditArch[arch]})
			}
			for _, foreign := range []uint32{0x40000003 /* i386 */, 0x40000028 /* arm */, 0, 0xffffffff, auditArch["amd64"], auditArch["arm64"]} {
				check(call{nr: 1, arch: foreign})
			}
			for name := range rules {
				nr, ok := numbers[arch][name]
				if !ok {
					continue
				}
				for _, v := range values {
					for _, w := range []uint64{0, 1, 4, 9, 12, 15, 16, 0xdead00000000, 0xdead00000009} {
						check(call{nr: nr, arch: auditArch[arch], args: [6]uint64{v, v, w}})
					}
				}
			}
		}
	}
}

// What must never be allowed, whatever the table says next year.
func TestTheDangerousStayOut(t *testing.T) {
	never := strings.Fields(`bpf perf_event_open keyctl add_key request_key userfaultfd kexec_load kexec_file_load init_module
		finit_module delete_module io_uring_setup io_uring_enter io_uring_register open_by_handle_at pidfd_getfd reboot swapon swapoff
		iopl ioperm acct settimeofday clock_settime syslog quotactl quotactl_fd fsopen fsconfig fsmount fspick open_tree move_mount
		mount_setattr open_tree_attr process_madvise kcmp fanotify_init vhangup modify_ldt migrate_pages move_pages lookup_dcookie nfsservctl`)
	strict := append(slices.Clone(never), strings.Fields("mount umount2 pivot_root chroot unshare setns sethostname setdomainname")...)
	for p, names := range map[Profile][]string{Strict: strict, Nested: never} {
		allowed := Calls(p)
		for _, name := range names {
			if _, ok := allowed[name]; ok {
				t.Errorf("%s allows %s", p, name)
			}
		}
	}
	for p, want := range map[Profile]bool{Strict: false, Nested: true} {
		if _, ok := Calls(p)["clone3"]; ok != want {
			t.Errorf("%s and clone3: %v", p, ok)
		}
	}
}

// Filters stack, so a wider profile below a narrower one must not take anything away.
func TestEachProfileContainsTheOneBefore(t *testing.T) {
	for _, arch := range Archs() {
		for i := 1; i < len(Profiles); i++ {
			narrow, _ := Compile(Profiles[i-1], arch)
			wide, _ := Compile(Profiles[i], arch)
			for nr := range uint32(600) {
				for _, v := range []uint64{0, 1, 2, 10, 16, 0x11, 0x10000000, 0x5412} {
					c := call{nr: nr, arch: auditArch[arch], args: [6]uint64{v, v, v}}
					a, _ := interpret(narrow, c)
					b, _ := interpret(wide, c)
					if a == Allow && b != Allow {
						t.Errorf("%s allows %d(%#x) on %s, %s does not", Profiles[i-1], nr, v, arch, Profiles[i])
					}
				}
			}
		}
	}
}

func TestEveryNameIsACall(t *testing.T) {
	for name := range Calls(Nested) {
		_, amd := numbers["amd64"][name]
		_, arm := numbers["arm64"][name]
		if !amd && !arm {
			t.Errorf("%q is no system call of either architecture", name)
		}
	}
}

func TestGeneratedFilesAreFresh(t *testing.T) {
	if _, err := os.Stat("policy.go"); err != nil {
		t.Skip("no source tree here: ", err)
	}
	for _, arch := range Archs() {
		want, err := Source(arch)
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join("..", "programs_"+arch+".gen.go"))
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("programs_%s.gen.go is stale (%v): run go generate ./seccomp", arch, err)
		}
	}
}

func TestAJumpTooFarIsAnError(t *testing.T) {
	a := &assembler{labels: map[string]int{}}
	a.jump(opEqual, 0, "end", "end")
	for range 256 {
		a.load(offNumber)
	}
	a.label("end")
	a.emit(Instruction{Code: opReturn}, "", "")
	if _, err := a.assemble(); err == nil {
		t.Error("a distance of 256 was encoded in eight bits")
	}
}
