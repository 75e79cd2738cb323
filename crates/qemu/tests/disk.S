# A guest that reads the second sector of its first disk again and again, and prints its first 8 bytes.
.code16
.globl _start
_start:
 cli
 xor %ax,%ax
 mov %ax,%ds
 mov %ax,%ss
 mov %ax,%es
 mov $0x7000,%sp
 mov %dl,drive            # the BIOS's number of the disk it booted from
 sti
outer:
 movb $0x42,%ah           # extended read
 mov drive,%dl
 mov $packet,%si
 int $0x13
 jc bad
 mov $0x9000,%si
 mov $8,%cx
1: lodsb
 call put
 loop 1b
 mov $10,%al
 call put
 jmp outer
bad: mov $'X',%al
 call put
 hlt
put: mov %al,%ah          # waits until the last character has gone, or this one would replace it
 mov $0x3fd,%dx
5: in %dx,%al
 test $0x20,%al
 jz 5b
 mov %ah,%al
 mov $0x3f8,%dx
 out %al,%dx
 ret
drive: .byte 0
.align 4
packet: .byte 16,0
 .word 1                  # one sector
 .word 0x9000,0           # to here
 .quad 1                  # from sector 1 on
.org 510
.word 0xaa55
