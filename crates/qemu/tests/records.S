# A guest that writes records to its first disk, one after another, and prints the number of each, in hex, once its disk has it.
# A record is a page: its number, and 1023 numbers that follow from it. Record N is on page 1 + N % 64.
# Each is read back. The guest prints an X and ends if the disk fails or has something else.
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
 cld
 sti
outer:
 incl count
 mov count,%eax
 mov $0x9000,%di
 mov $1024,%cx
1: stosl
 imul $1664525,%eax,%eax
 add $1013904223,%eax
 loop 1b
 mov count,%eax
 and $63,%eax
 inc %eax
 shl $3,%eax              # sectors
 mov %eax,packet+8
 mov $0x4300,%ax          # extended write, without verifying
 movw $0x9000,packet+4
 call disk
 movl $0,0xa000
 mov $0x4200,%ax          # extended read
 movw $0xa000,packet+4
 call disk
 mov $0x9000,%si
 mov $0xa000,%di
 mov $2048,%cx
 repe cmpsw
 jne bad
 mov count,%edx
 mov $8,%cx
2: rol $4,%edx
 mov %dl,%al
 and $15,%al
 add $48,%al
 cmp $57,%al
 jbe 3f
 add $39,%al
3: call put
 loop 2b
 mov $10,%al
 call put
 jmp outer
disk: movw $8,packet+2    # one page
 mov drive,%dl
 mov $packet,%si
 int $0x13
 jc bad
 ret
bad: mov $'X',%al
 call put
 mov $10,%al
 call put
 cli
 hlt
put: push %dx             # waits until the last character has gone, or this one would replace it
 mov %al,%ah
 mov $0x3fd,%dx
5: in %dx,%al
 test $0x20,%al
 jz 5b
 mov %ah,%al
 mov $0x3f8,%dx
 out %al,%dx
 pop %dx
 ret
drive: .byte 0
.align 4
count: .long 0
packet: .byte 16,0
 .word 8
 .word 0,0                # to or from here
 .quad 0                  # from this sector on
.org 510
.word 0xaa55
