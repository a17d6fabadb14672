package meta

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// row is a line of an Offset/Size/Field/Meaning table.
type row struct {
	off, size int
	field     string
}

var structure = regexp.MustCompile(`^#+ (.+), (\d+) bytes$`)

// structures reads every such table of docs/formats.md: under a heading that ends with the size of the structure, rows
// that leave no gap.
func structures(t *testing.T) map[string][]row {
	t.Helper()
	b, err := os.ReadFile("../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]row{}
	name, size, next := "", 0, 0
	end := func() {
		if name != "" && next != size {
			t.Errorf("%s: the rows end at %d of %d bytes", name, next, size)
		}
		name = ""
	}
	for line := range strings.Lines(string(b)) {
		line = strings.TrimSpace(line)
		if m := structure.FindStringSubmatch(line); m != nil {
			end()
			name, next = m[1], 0
			size, _ = strconv.Atoi(m[2]) // digits alone
			continue
		}
		if strings.HasPrefix(line, "#") {
			end()
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		if name == "" || !strings.HasPrefix(line, "|") || len(cells) != 4 {
			continue
		}
		off, err := strconv.Atoi(strings.TrimSpace(cells[0]))
		n, err2 := strconv.Atoi(strings.TrimSpace(cells[1]))
		if err != nil || err2 != nil {
			continue // the head of the table
		}
		f := strings.TrimSpace(cells[2])
		if off != next || n <= 0 {
			t.Errorf("%s: %q at %d of %d bytes, the row before ends at %d", name, f, off, n, next)
		}
		next = off + n
		out[name] = append(out[name], row{off, n, f})
	}
	end()
	return out
}

// TestDocumentedStructures holds the tables of docs/formats.md to the constants that the code uses: each field at its
// offset, as long as the room that it has, and no field in one that the other lacks.
func TestDocumentedStructures(t *testing.T) {
	type fields map[string][2]int // offset, size
	for name, c := range map[string]struct {
		size   int
		fields fields
	}{
		"Header": {HeaderSize, fields{"magic": {hMagic, len(headerMagic)}, "version": {hVersion, 4}, "size": {hSize, 4}, "generation": {hGeneration, 8},
			"flags": {hFlags, 4}, "page size": {hPageSize, 4}, "arena pages": {hPages, 4}, "entries": {hEntries, 4}, "overflow records": {hOverflow, 4},
			"namespaces": {hNamespaces, 4}, "sessions": {hSessions, 4}, "arena id": {hArenaID, hInode - hArenaID}, "arena inode": {hInode, 8}, "huge page": {hHuge, 8},
			"created": {hCreated, 8}, "name length": {hNameLen, 1}, "name": {hName, MaxName}, "CRC": {hCRC, hEnd - hCRC}}},
		"Namespace": {NamespaceSize, fields{"word": {nWord, 8}, "magic": {nMagic, 4}, "CRC": {nCRC, 4}, "flags": {nFlags, 4}, "groups": {nGroups, 2}, "ranks": {nRanks, 2},
			"id": {nID, nDescLen - nID}, "description length": {nDescLen, 4}, "group records": {nGroup, MaxGroups * nGroupSize}, "parts": {nParts, 4 * MaxParts},
			"description": {nDesc, MaxDescription}}},
		"Group record": {nGroupSize, fields{"kind": {0, 1}, "chunk tokens": {4, 4}, "window": {8, 4}}},
		"Session": {SessionSize, fields{"word": {sWord, 8}, "magic": {sMagic, 4}, "CRC": {sCRC, 4}, "session": {sSession, 8}, "role": {sRole, 1}, "rank": {sRank, 2},
			"world size": {sWorld, 2}, "pid": {sPID, 4}, "uid": {sUID, 4}, "start": {sStart, 8}, "engine id length": {sIDLen, 1}, "engine id": {sID, MaxEngineID}}},
		"Entry": {EntrySize, fields{"word": {eWord, 8}, "tick": {eTick, 8}, "CRC": {eCRC, 4}, "namespace": {eNamespace, 2}, "group": {eGroup, 2}, "key length": {eKeyLen, 1},
			"inline extents": {eInline, 1}, "flags": {eFlags, 2}, "position": {ePosition, 4}, "parent entry": {eParent, 4}, "parent generation": {eParentGen, 4},
			"key": {eKey, ePages - eKey}, "pages": {ePages, 4}, "extents": {eExtents, 4}, "overflow": {eOverflow, 4}, "payload": {ePayload, 4},
			"extent array": {eInl, 8 * InlineExtents}}},
		"Overflow": {OverflowSize, fields{"owner": {oOwner, 4}, "generation": {oGen, 4}, "next": {oNext, 4}, "CRC": {oCRC, 4}, "extent array": {oExtents, 8 * OverflowSlots}}},
	} {
		rows := structures(t)[name]
		if len(rows) == 0 {
			t.Errorf("docs/formats.md has no table for %s", name)
			continue
		}
		if last := rows[len(rows)-1]; last.off+last.size != c.size {
			t.Errorf("%s: %d bytes in the table, %d in the code", name, last.off+last.size, c.size)
		}
		seen := 0
		for _, r := range rows {
			if r.field == "zero" {
				continue
			}
			seen++
			if want, ok := c.fields[r.field]; !ok || want != [2]int{r.off, r.size} {
				t.Errorf("%s: %q at %d of %d bytes in the table, %v in the code", name, r.field, r.off, r.size, want)
			}
		}
		if seen != len(c.fields) {
			t.Errorf("%s: %d fields in the table, %d in the code", name, seen, len(c.fields))
		}
	}
}

// TestDocumentedNumbers: what the text says in other places than those tables.
func TestDocumentedNumbers(t *testing.T) {
	b, err := os.ReadFile("../docs/formats.md")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	l := NewLayout(5, 0)
	var states []string
	for s := range lastState {
		states = append(states, fmt.Sprintf("\n| %d | %v |", s, s))
	}
	for _, want := range slices.Concat(states, []string{
		fmt.Sprintf("| header, copies A and B | 0 | 2 × %d bytes |", HeaderSize),
		fmt.Sprintf("| namespaces | %d | %d × %d bytes |", l.namespaces, MaxNamespaces, NamespaceSize),
		fmt.Sprintf("| sessions | %d | %d × %d bytes |", l.sessions, MaxSessions, SessionSize),
		fmt.Sprintf("| entries | %d | *n* × %d bytes |", l.entries, EntrySize),
		fmt.Sprintf("| overflow extents | %d + %d *n* | *m* × %d bytes |", l.entries, (l.overflow-l.entries)/5, OverflowSize),
		fmt.Sprintf("| magic | `%s` and the byte %d |", headerMagic[:7], headerMagic[7]),
		fmt.Sprintf("| version | %d |", Version),
		fmt.Sprintf("| magic | `%s` |", le.AppendUint32(nil, namespaceMagic)),
		fmt.Sprintf("| magic | `%s` |", le.AppendUint32(nil, sessionMagic)),
		fmt.Sprintf("`%#x`", usedWord),
		fmt.Sprintf("`%#x` none yet", NoNamespace),
		fmt.Sprintf("at most %d + %d *m*", InlineExtents, OverflowSlots),
		fmt.Sprintf("*g*, 1 to %d", MaxGroups),
		fmt.Sprintf("*g* × *r* is at most %d", MaxParts),
		fmt.Sprintf("bytes that are kept, at most %d", MaxDescription),
		fmt.Sprintf("| role | %d %v, %d %v |", Manager, Manager, Worker, Worker),
		fmt.Sprintf("| kind | %d %v, %d %v, %d %v, %d %v |", Full, Full, Window, Window, StateG, StateG, Draft, Draft),
	}) {
		if !strings.Contains(text, want) {
			t.Errorf("docs/formats.md does not say %q", want)
		}
	}
	if lastState != 5 || lastKind != 4 {
		t.Errorf("%d states and %d kinds: a new one has to be described", lastState, lastKind)
	}
}
